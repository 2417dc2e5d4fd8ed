"""What a step of decoding costs, by the distinct KV tokens that it reads and by its branches.

    python -m benchmarks.step_cost [--json FILE] [--quick] [--kv-dtype int8] [--threads N]

Steps of the real runner on SmolLM2-135M: branches below one shared prefix, each with 16 tokens of
its own and one new row that is sampled greedily. A line is fitted through the shortest times of
the repeats, weighted so that relative errors count. Shared tokens must not get dearer with more
branches by more than their arithmetic, which grows in proportion to the branches. On a machine that
others use take one thread: several wait for each other.
"""

import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from agentkv.core.batch import Batch, Sample, Stream
from agentkv.core.step_cost import StepCost, StepWork
from agentkv.model.hand_batch import BranchRows, Piece, batch_of
from agentkv.model.kv_cache import KV_DTYPES, KVCache
from agentkv.model.loader import load_model
from agentkv.model.model_runner import ModelRunner
from agentkv.model.model_shape import describe_model
from agentkv.model.sampler import Sampler
from agentkv.sampling_params import SamplingParams
from agentkv_kernels.native import load_native
from benchmarks.report import Report, Result, Target, parser_for

MODEL = "smollm2"
BLOCK_SIZE = 16
OWN_TOKENS = 16
MIN_R_SQUARED = 0.98
MAX_GROWTH = 1.0
"""Of the slope per shared token, against that of one branch times the number of branches."""


class Grid(NamedTuple):
    """What is measured: every number of branches with every prefix."""

    branches: tuple[int, ...]
    prefixes: tuple[int, ...]
    """Shared tokens, multiples of the block size."""
    repeats: int


FULL = Grid((1, 4, 16, 32), (128, 1024, 2048, 4096), repeats=5)
QUICK = Grid((1, 4), (64, 128, 256), repeats=2)


class Point(NamedTuple):
    """One place of the grid, measured."""

    num_branches: int
    prefix: int
    work: StepWork
    seconds: tuple[float, ...]
    """Of each repeat."""

    @property
    def fastest(self) -> float:
        """The shortest of the repeats: what else runs on a machine only adds to a step."""
        return min(self.seconds)


class Fit(NamedTuple):
    """A cost, and how well it says what was measured."""

    cost: StepCost
    r_squared: float
    worst: float
    """Largest residual, as a share of the time measured."""


def main() -> None:
    """Measures, prints one table and the fit, and writes the JSON file if one is asked for."""
    parser = parser_for(__doc__)
    parser.add_argument("--quick", action="store_true", help="a small grid, to see that it runs")
    parser.add_argument("--kv-dtype", choices=sorted(KV_DTYPES), help="8-bit KV")
    parser.add_argument("--threads", type=int, help="of the model; default: torch's")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    grid = QUICK if options.quick else FULL
    points = measure(_runner(grid, KV_DTYPES.get(options.kv_dtype)), grid)
    fit = fit_cost(points)
    report(points, fit).publish(options.json)
    print(fit.cost)
    print(f"R^2 {fit.r_squared:.4f}, worst residual {100 * fit.worst:.1f} % of the time measured")


def measure(runner: ModelRunner, grid: Grid) -> list[Point]:
    """Times each step of the grid; a turn goes through all of them, the first one uncounted."""
    places = [(count, prefix) for count in grid.branches for prefix in grid.prefixes]
    batches = [_batch(*place) for place in places]
    seconds: list[list[float]] = [[] for _ in places]
    for turn in range(grid.repeats + 1):
        for batch, taken in zip(batches, seconds, strict=True):
            begin = time.perf_counter()
            runner.run(batch)
            if turn:
                taken.append(time.perf_counter() - begin)
    return [
        Point(count, prefix, _work(count, prefix), tuple(taken))
        for (count, prefix), taken in zip(places, seconds, strict=True)
    ]


def fit_cost(points: Sequence[Point]) -> Fit:
    """Fits by least squares of the relative errors; at least four points, not all in a line."""
    works = np.array([(1, *point.work) for point in points], dtype=np.float64)
    times = np.array([point.fastest for point in points])
    found, *_ = np.linalg.lstsq(works / times[:, None], np.ones(len(points)), rcond=None)
    predicted = works @ found
    unexplained = float(((times - predicted) ** 2).sum())
    r_squared = 1 - unexplained / float(((times - times.mean()) ** 2).sum())
    worst = float((np.abs(times - predicted) / times).max())
    return Fit(StepCost(*map(float, found)), r_squared, worst)


def slope(points: Sequence[Point], num_branches: int) -> float:
    """Measures seconds per shared token for so many branches, over the whole range of prefixes."""
    chosen = [point for point in points if point.num_branches == num_branches]
    prefixes = [point.prefix for point in chosen]
    return float(np.polyfit(prefixes, [point.fastest for point in chosen], 1)[0])


def report(points: Sequence[Point], fit: Fit) -> Report:
    """Sums up what was measured and how it was meant to be."""
    counts = sorted({point.num_branches for point in points})
    slopes = {count: slope(points, count) for count in counts}
    growth = max(slopes[count] / (slopes[counts[0]] * count / counts[0]) for count in counts[1:])
    results = [
        Result.of(
            f"{point.num_branches} x {point.prefix}",
            "agentkv",
            "step",
            "ms",
            [1e3 * seconds for seconds in point.seconds],
        )
        for point in points
    ]
    results += [
        Result.of(f"{count} branches", "agentkv", "per shared token", "us", [1e6 * value])
        for count, value in slopes.items()
    ]
    named = {
        "fixed": fit.cost.fixed,
        "per row": fit.cost.per_row,
        "per distinct token": fit.cost.per_distinct_token,
        "per token and row": fit.cost.per_read_token,
    }
    results += [
        Result.of("fit", "agentkv", name, "us", [1e6 * value]) for name, value in named.items()
    ]
    return Report(
        name="step_cost",
        results=tuple(results),
        targets=(
            Target.at_most(
                "growth of the slope per shared token over its arithmetic", growth, MAX_GROWTH
            ),
            Target.at_least("R^2 of the fit", fit.r_squared, MIN_R_SQUARED),
        ),
    )


def _work(num_branches: int, prefix: int) -> StepWork:
    own = OWN_TOKENS * num_branches
    return StepWork(num_branches, prefix + own, prefix * num_branches + own)


def _batch(num_branches: int, prefix: int) -> Batch:
    """One row for each of the branches below a prefix of whole blocks; the last token is new."""
    shared = Piece(0, 0, prefix, tuple(range(prefix // BLOCK_SIZE)))
    first = prefix // BLOCK_SIZE
    end = prefix + OWN_TOKENS
    branches = [
        BranchRows((1 + branch,), end - 1, (shared, Piece(1 + branch, prefix, end, (block,))))
        for branch, block in enumerate(range(first, first + num_branches))
    ]
    samples = [
        Sample(row, None, SamplingParams(), Stream(0, row), end) for row in range(num_branches)
    ]
    return batch_of(branches, block_size=BLOCK_SIZE, samples=samples)


def _runner(grid: Grid, kv_dtype: torch.dtype | None) -> ModelRunner:
    """Makes a runner with room for the largest place of a grid; its KV is zeros."""
    model = load_model(MODEL).model
    kv = KVCache(
        describe_model(model),
        num_blocks=max(grid.prefixes) // BLOCK_SIZE + max(grid.branches),
        block_size=BLOCK_SIZE,
        dtype=kv_dtype,
    )
    kv.poison(0.0)
    return ModelRunner(model, kv, Sampler(load_native()))


if __name__ == "__main__":
    main()
