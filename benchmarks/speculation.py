"""What guessing ahead gains: tokens per second of an engine with drafts and without.

    python -m benchmarks.speculation [--json FILE] [--quick] [--speculate N] [--threads N]

SmolLM2-135M on a CPU, greedy: an edit that mostly repeats the file before it, and free text; on one
branch, and on 16 branches that each have a prompt of their own. Both runs must say the same. On a
machine that others use take one thread: several wait for each other.
"""

import time
from typing import NamedTuple

import torch

from agentkv.config import EngineConfig, SchedulerConfig
from agentkv.engine.build import build_engine
from agentkv.engine.engine import Engine
from agentkv.engine.operations import Generation
from agentkv.engine.outputs import Chunk, Finish
from agentkv.sampling_params import SamplingParams
from benchmarks.report import Report, Result, Target, parser_for

MODEL = "smollm2"
TENANT = "benchmark"
CODE = """\
def total(prices):
    result = 0
    for price in prices:
        result = result + price
    return result


def average(prices):
    return total(prices) / len(prices)


def largest(prices):
    result = prices[0]
    for price in prices:
        if price > result:
            result = price
    return result
"""
WORKLOADS = {
    "edit": f"Before:\n\n# version {{0}}\n{CODE}\n\nAfter:\n\n# version {{0}}.1\n{CODE[:70]}",
    "free": "Chapter {0}. It was a quiet morning in the village by the sea, and the old fisherman",
}
MIN_GAIN = 1.3
"""Of repetitive text on one branch."""
MAX_LOSS = 0.95
"""Of anything else."""


class Run(NamedTuple):
    """One generation of some branches."""

    seconds: float
    tokens: tuple[tuple[int, ...], ...]
    drafted: int
    accepted: int

    @property
    def rate(self) -> float:
        """Tokens per second, of all branches together."""
        return sum(map(len, self.tokens)) / self.seconds


def main() -> None:
    """Measures, prints one table, and writes the JSON file if one is asked for."""
    parser = parser_for(__doc__)
    parser.add_argument("--quick", action="store_true", help="few tokens, to see that it runs")
    parser.add_argument("--speculate", type=int, default=8, help="most tokens of a draft")
    parser.add_argument("--threads", type=int, help="of the model; default: torch's")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    max_tokens, repeats = (12, 1) if options.quick else (48, 2)
    scheduler = SchedulerConfig(num_speculative_tokens=options.speculate)
    config = EngineConfig(model=MODEL, num_blocks=1024, scheduler=scheduler)
    engine = build_engine(config)
    results: list[Result] = []
    targets: list[Target] = []
    for workload in WORKLOADS:
        for count in (1,) if options.quick else (1, 16):
            name = f"{workload} x {count}"
            plain, guessed = measure(engine, workload, count, max_tokens, repeats)
            results += [
                Result.of(name, "agentkv", "without drafts", "tokens/s", [r.rate for r in plain]),
                Result.of(name, "agentkv", "with drafts", "tokens/s", [r.rate for r in guessed]),
                Result.of(
                    name,
                    "agentkv",
                    "guesses accepted",
                    "share",
                    [r.accepted / max(1, r.drafted) for r in guessed],
                ),
            ]
            gain = max(r.rate for r in guessed) / max(r.rate for r in plain)
            is_gain = workload == "edit" and count == 1
            least = MIN_GAIN if is_gain else MAX_LOSS
            targets.append(Target.at_least(f"{name}: with drafts / without", gain, least))
            same = sum(a == b for a, b in zip(plain[0].tokens, guessed[0].tokens, strict=True))
            targets.append(Target.at_least(f"{name}: branches that say the same", same, count))
    Report("speculation", tuple(results), tuple(targets)).publish(options.json)


def measure(
    engine: Engine, workload: str, count: int, max_tokens: int, repeats: int
) -> tuple[list[Run], list[Run]]:
    """Times both ways in turn, after a first turn that is not counted."""
    runs: tuple[list[Run], list[Run]] = ([], [])
    for turn in range(repeats + 1):
        for drafts, mine in zip((0, None), runs, strict=True):
            run = generate(engine, workload, count, max_tokens, drafts)
            if turn or repeats == 1:
                mine.append(run)
    return runs


def generate(engine: Engine, workload: str, count: int, max_tokens: int, drafts: int | None) -> Run:
    """Generates on fresh contexts, whose prompts are computed before the clock starts."""
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, num_speculative_tokens=drafts)
    contexts = []
    for number in range(count):
        tokens = engine.tokenizer.encode(WORKLOADS[workload].format(number))
        contexts.append(engine.run(engine.contexts.create(TENANT, tokens)).answer.context.id)
    begin = time.perf_counter()
    streams = [engine.inference.generate(TENANT, context, params) for context in contexts]
    while engine.has_work:
        engine.step()
    seconds = time.perf_counter() - begin
    said = [_said(stream) for stream in streams]
    engine.contexts.release(TENANT, contexts)
    return Run(
        seconds,
        tuple(tokens for tokens, _ in said),
        sum(finish.usage.drafted_tokens for _, finish in said),
        sum(finish.usage.accepted_tokens for _, finish in said),
    )


def _said(stream: Generation) -> tuple[tuple[int, ...], Finish]:
    tokens: list[int] = []
    for update in stream.take_news():
        if isinstance(update, Chunk):
            tokens += update.token_ids
        elif isinstance(update, Finish):
            return tuple(tokens), update
    raise AssertionError("a stream ended without an end")


if __name__ == "__main__":
    main()
