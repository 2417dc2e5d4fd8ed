"""What a fork costs inside the engine: microseconds, blocks and bytes, by length of the context.

    python -m benchmarks.fork [--json FILE] [--quick]

`Contexts.fork` is timed call by call on contexts of 1k, 16k and 128k tokens in turn, so that a busy
machine disturbs all lengths alike; what was forked is released between two rounds, not timed. The
garbage collector stays on, as in service. Forks at the head, at the middle (the first such fork
cuts the segment in two and is timed by itself), and 1,000 branches in one call. Blocks are
counted by the pool, bytes by the copies a step would have to do. There is no model and no wire.
"""

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

from agentkv.engine.engine import Engine
from benchmarks.hollow_runner import BLOCK_SIZE, VOCAB_SIZE, HollowRunner, hollow_engine
from benchmarks.report import Report, Result, Target, parser_for

TENANT = "tenant"
ENGINE = "agentkv"
FORK_MICROSECONDS = 20.0
FLATNESS = 1.2
"""Most that the longest context's fork may take, in times of the shortest's."""
NUM_BRANCHES = 1000
BRANCHES_MILLISECONDS = 50.0


@dataclass(frozen=True, slots=True)
class Plan:
    """How much to measure."""

    lengths: tuple[int, ...] = (1 << 10, 1 << 14, 1 << 17)
    num_rounds: int = 40
    forks_per_round: int = 50
    num_calls: int = 15
    """Calls that make 1,000 branches."""


QUICK = Plan(lengths=(64, 1024), num_rounds=2, forks_per_round=5, num_calls=2)


class Contexts:
    """One engine with a context of each length, all of it computed."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self.runner = HollowRunner()
        num_blocks = 2 * sum(lengths) // BLOCK_SIZE + 1024
        self.engine: Engine = hollow_engine(
            self.runner, num_blocks=num_blocks, max_length=max(lengths) + 1024
        )
        self.ids = {length: self._create(number, length) for number, length in enumerate(lengths)}
        self.blocks_taken = 0
        """Most blocks that were taken while branches lived."""
        self._free = self.engine.observer.pool().free

    def fork(self, context_id: str, *, count: int = 1, at: int | None = None) -> float:
        """Times one call in seconds, and releases its branches."""
        start = time.perf_counter()
        views = self.engine.contexts.fork(TENANT, context_id, count=count, at=at)
        seconds = time.perf_counter() - start
        self._let_go([view.id for view in views])
        return seconds

    def kept_forks(self, context_id: str, num_forks: int, at: int | None) -> list[float]:
        """Times calls whose branches all live until the last one, in seconds each."""
        seconds, ids = [], []
        for _ in range(num_forks):
            start = time.perf_counter()
            views = self.engine.contexts.fork(TENANT, context_id, at=at)
            seconds.append(time.perf_counter() - start)
            ids.append(views[0].id)
        self._let_go(ids)
        return seconds

    def _let_go(self, ids: Sequence[str]) -> None:
        """Sees what the branches cost, lets a step do what they left to it, and releases them."""
        self.engine.step()
        self.blocks_taken = max(self.blocks_taken, self._free - self.engine.observer.pool().free)
        self.engine.contexts.release(TENANT, ids)

    def _create(self, number: int, length: int) -> str:
        token_ids = [(position * 7 + number) % VOCAB_SIZE for position in range(length)]
        return self.engine.run(self.engine.contexts.create(TENANT, token_ids)).answer.context.id


def main() -> None:
    """Measures, prints one table and writes the JSON file if one is asked for."""
    parser = parser_for(__doc__)
    parser.add_argument("--quick", action="store_true", help="small sizes: does it run at all?")
    options = parser.parse_args()
    measure(QUICK if options.quick else Plan()).publish(options.json)


def measure(plan: Plan) -> Report:
    """Times forks by length, interleaved."""
    contexts = Contexts(plan.lengths)
    first_cuts = _first_cuts(contexts, plan)
    heads: dict[int, list[float]] = {length: [] for length in plan.lengths}
    middles: dict[int, list[float]] = {length: [] for length in plan.lengths}
    anchors = [
        contexts.engine.contexts.fork(TENANT, context_id, at=length // 2)[0]
        for length, context_id in contexts.ids.items()
    ]  # while one lives the cut stays, as it does once a tree has branched there
    for number in range(plan.num_rounds + 1):
        for length, context_id in contexts.ids.items():
            head = contexts.kept_forks(context_id, plan.forks_per_round, None)
            middle = contexts.kept_forks(context_id, plan.forks_per_round, length // 2)
            if number > 0:  # the first round warms up
                heads[length].append(1e6 * statistics.median(head))
                middles[length].append(1e6 * statistics.median(middle))
    longest = plan.lengths[-1]
    calls = [
        1e3 * contexts.fork(contexts.ids[longest], count=NUM_BRANCHES)
        for _ in range(plan.num_calls + 1)
    ][1:]
    contexts.engine.contexts.release(TENANT, [anchor.id for anchor in anchors])
    results = [
        *(_timed(f"at the head of {n}", "median fork", "us", heads[n]) for n in plan.lengths),
        *(_timed(f"at the middle of {n}", "median fork", "us", middles[n]) for n in plan.lengths),
        *(_timed(f"first at the middle of {n}", "fork", "us", first_cuts[n]) for n in plan.lengths),
        _timed(f"{NUM_BRANCHES} of {longest} in one call", "call", "ms", calls),
        _timed("all of these", "blocks taken", "blocks", [contexts.blocks_taken]),
        _timed("all of these", "KV copied", "bytes", [contexts.runner.bytes_copied]),
    ]
    medians = {length: statistics.median(values) for length, values in heads.items()}
    flatness = medians[longest] / medians[plan.lengths[0]]
    targets = (
        Target.at_most("p50 of a fork, us", max(medians.values()), FORK_MICROSECONDS),
        Target.at_most("longest over shortest context", flatness, FLATNESS),
        Target.at_most("1,000 branches in one call, ms", statistics.median(calls),
                       BRANCHES_MILLISECONDS),
        Target.at_most("blocks taken", contexts.blocks_taken, 0),
        Target.at_most("bytes copied", contexts.runner.bytes_copied, 0),
    )  # fmt: skip
    return Report("fork", tuple(results), targets)


def _first_cuts(contexts: Contexts, plan: Plan) -> dict[int, list[float]]:
    """Times forks that each find the segment whole: releasing the branch joins it again."""
    return {
        length: [1e6 * contexts.fork(context_id, at=length // 2) for _ in range(plan.num_calls)]
        for length, context_id in contexts.ids.items()
    }


def _timed(workload: str, metric: str, unit: str, values: Sequence[float]) -> Result:
    return Result.of(workload, ENGINE, metric, unit, values)


if __name__ == "__main__":
    main()
