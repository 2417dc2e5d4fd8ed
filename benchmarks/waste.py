"""How much of the pool holds nothing: allocated slots without a token's KV, in a mixed run.

    python -m benchmarks.waste [--json FILE] [--quick]

The workload: sessions arrive one after the other. Each has a prompt of 200 to 1,500 tokens, half
of it one of four system prompts, and then 4 to 10 turns. A turn extends a branch by 20 to 300
tokens, or forks 2 to 8 branches at the head or at an earlier token and generates 16 to 400 tokens
on each, one of which lives on. Sessions are released at random. The share is read after every
step, with the prefix cache, and in runs of their own without: whole cached blocks hide what live
contexts waste. There is no model.
"""

import random
import statistics
from dataclasses import dataclass

from agentkv.engine.engine import Engine
from agentkv.engine.operations import Operation
from agentkv.sampling_params import SamplingParams
from benchmarks.hollow_runner import VOCAB_SIZE, HollowRunner, hollow_engine
from benchmarks.report import Report, Result, Target, parser_for

TENANT = "tenant"
WASTE = 0.04
SYSTEM_PROMPTS = 4
MAX_LENGTH = 16_384


@dataclass(frozen=True, slots=True)
class Plan:
    """How much to run."""

    num_sessions: int = 30
    most_living: int = 12
    """Sessions that live at once."""
    num_blocks: int = 4096
    seeds: tuple[int, ...] = (1, 2, 3)


QUICK = Plan(num_sessions=3, most_living=2, seeds=(1,))


class Sessions:
    """One engine under the workload, and the share of waste after each step."""

    def __init__(self, plan: Plan, seed: int, *, has_cache: bool) -> None:
        self.waste: list[float] = []
        self._random = random.Random(seed)
        self._engine: Engine = hollow_engine(
            HollowRunner(), num_blocks=plan.num_blocks, max_length=MAX_LENGTH
        )
        self._has_cache = has_cache
        self._most_living = plan.most_living
        self._living: list[list[str]] = []
        self._systems = [self._tokens(100, 750) for _ in range(SYSTEM_PROMPTS)]

    def play(self) -> None:
        """Plays one session; releases an old one when too many live."""
        system = self._random.choice(self._systems)
        created = self._engine.contexts.create(TENANT, [*system, *self._tokens(100, 750)])
        self._run(created)
        session = [created.answer.context.id]
        self._living.append(session)
        for _ in range(self._random.randint(4, 10)):
            if self._random.random() < 0.5:
                self._run(self._engine.contexts.extend(TENANT, session[-1], self._tokens(20, 300)))
            else:
                self._branch(session)
        if len(self._living) > self._most_living:
            old = self._living.pop(self._random.randrange(len(self._living)))
            self._engine.contexts.release(TENANT, old)

    def _branch(self, session: list[str]) -> None:
        """Generates on branches of the last context of a session; one of them lives on."""
        at = None
        if self._random.random() < 0.3:
            length = self._engine.observer.get(TENANT, session[-1]).length
            at = self._random.randint(length // 2, length)
        views = self._engine.contexts.fork(
            TENANT, session[-1], count=self._random.randint(2, 8), at=at
        )
        params = [SamplingParams(max_tokens=self._random.randint(16, 400)) for _ in views]
        self._run(
            *(
                self._engine.inference.generate(TENANT, view.id, each)
                for view, each in zip(views, params, strict=True)
            )
        )
        ids = [view.id for view in views]
        kept = ids.pop(self._random.randrange(len(ids)))
        self._engine.contexts.release(TENANT, ids)
        session.append(kept)

    def _run(self, *operations: Operation) -> None:
        while not all(operation.is_done for operation in operations):
            self._engine.step()
            if not self._has_cache:
                self._engine.flush_cache()
            self.waste.append(self._engine.observer.pool().waste)
        assert not any(operation.error for operation in operations)

    def _tokens(self, least: int, most: int) -> list[int]:
        count = self._random.randint(least, most)
        return [self._random.randrange(VOCAB_SIZE) for _ in range(count)]


def main() -> None:
    """Measures, prints one table and writes the JSON file if one is asked for."""
    parser = parser_for(__doc__)
    parser.add_argument("--quick", action="store_true", help="small sizes: does it run at all?")
    options = parser.parse_args()
    measure(QUICK if options.quick else Plan()).publish(options.json)


def measure(plan: Plan) -> Report:
    """Runs the workload once per seed, with prefix cache and without."""
    results, targets = [], []
    for has_cache, name in ((True, "with prefix cache"), (False, "live contexts alone")):
        means, peaks = [], []
        for seed in plan.seeds:
            sessions = Sessions(plan, seed, has_cache=has_cache)
            for _ in range(plan.num_sessions):
                sessions.play()
            means.append(statistics.fmean(sessions.waste))
            peaks.append(max(sessions.waste))
        results += [
            Result.of(name, "agentkv", "mean share of slots", "1", means),
            Result.of(name, "agentkv", "largest share of slots", "1", peaks),
        ]
        targets.append(Target.at_most(f"mean share, {name}", statistics.median(means), WASTE))
    return Report("waste", tuple(results), tuple(targets))


if __name__ == "__main__":
    main()
