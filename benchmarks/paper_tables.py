"""The PagedAttention paper's claims on memory, and published search trees, on our own blocks.

    python -m benchmarks.paper_tables --data PATH [--json FILE] [--png FILE] [--quick]

Published figures stand beside ours as the engine "paper" (Kwon et al., SOSP 2023: figure 2 for
the shares of memory, figure 15 and section 6.3 for what sharing saves, figure 14 for the gain over
Orca with oracle lengths). What differs: their requests are drawn from ShareGPT and Alpaca, of which
we know the mean lengths alone and use them for every request; ours are the chat requests of the
Azure trace with at most 2,048 tokens. They ran OPT on GPUs; here the real scheduler plans every
step, and a step takes what SmolLM2-135M was measured to take on two CPU cores. Their Orca has a
buddy allocator, ours takes the first gap that fits. Who descends from whom in a beam search is
drawn, not decided by a model. Trees are built from their published levels.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from agentkv.core.step_cost import StepCost
from benchmarks.evaluation.decoding import saved_by_beams, saved_by_samples
from benchmarks.evaluation.meters import Limits
from benchmarks.evaluation.plots import Bars, draw
from benchmarks.evaluation.policies import CONTESTANTS, ORCA, SHARING
from benchmarks.evaluation.runs import Outcome, Setting, play_requests
from benchmarks.evaluation.simulated_step import Costs
from benchmarks.evaluation.traces import Length, azure_requests
from benchmarks.evaluation.trees import (
    FAST_TREE,
    OTHERS,
    Shape,
    build,
    recomputed_after_fork,
)
from benchmarks.report import Report, Result, Target, parser_for

PAPER = "paper"
OURS = "agentkv"
COSTS = Costs(StepCost(5.8e-3, 2.5e-4, 1.9e-6, 2.0e-7), 2.6e-4, 4.1e-5)
"""Of SmolLM2-135M on two cores of an AMD EPYC: see `results/sessions.json`."""
SETTING = Setting(COSTS, Limits(float("inf"), float("inf")), num_blocks=1024, longest=2048)
MEMORY = "KV memory that holds tokens, pool always asked for more"
PUBLISHED_MEMORY = {
    "Orca-style, maximum length": 0.204,
    "Orca-style, next power of two": 0.268,
    "Orca-style, oracle length": 0.382,
    "paged, sharing": 0.963,
}
MEAN_LENGTHS = {"Alpaca": (19, 58), "ShareGPT": (161, 338)}
"""Tokens in and out, as the paper gives them."""
WIDTHS = (2, 4, 6)
PUBLISHED_SAVED = {
    ("samples", "Alpaca"): (0.061, 0.098),
    ("samples", "ShareGPT"): (0.162, 0.305),
    ("beams", "Alpaca"): (0.376, 0.552),
    ("beams", "ShareGPT"): (0.443, 0.663),
}
"""For the smallest and the largest of the widths."""
GAIN = "tokens/s over reserving the oracle length"
PUBLISHED_GAIN = {1: 1.3, 6: 2.3}
"""The larger one is for beams of that width; ours are samples."""
FILLED = 0.963


class Plan(NamedTuple):
    """How much to do."""

    num_requests: int = 200
    rate: float = 20.0
    """Requests per second, far more than can be served."""
    branches: tuple[int, ...] = (1, 2, 4, 6)
    divisors: tuple[int, ...] = (8, 4, 2, 1)
    shapes: tuple[Shape, ...] = (*FAST_TREE, *OTHERS)
    num_searches: int = 3


QUICK = Plan(num_requests=8, branches=(1, 2), divisors=(4,), shapes=FAST_TREE[:1], num_searches=1)


def main() -> None:
    """Counts, prints one table and writes what is asked for."""
    parser = parser_for(__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder of the traces")
    parser.add_argument("--png", type=Path, help="where to draw it; needs matplotlib")
    parser.add_argument("--quick", action="store_true", help="small sizes: does it run at all?")
    options = parser.parse_args()
    report = measure(options.data, QUICK if options.quick else Plan())
    report.publish(options.json)
    if options.png:
        draw(panels(report), options.png)


def measure(data: Path, plan: Plan) -> Report:
    """Makes all tables."""
    memory, gains = memory_shares(data, plan), gains_of(data, plan)
    saved = saved_by_sharing(plan)
    trees, recomputed = tree_blocks(plan)
    found = {result.engine: result.median for result in memory if result.workload == MEMORY}
    one, most = min(plan.branches), max(plan.branches)
    by_branches = {
        count: result.median
        for count in plan.branches
        for result in gains
        if result.workload == f"{count} branches" and result.engine == OURS
    }
    targets = (
        Target.at_least("allocated slots that hold a token, paged", found["of allocated"], FILLED),
        Target.at_least(f"gain at {most} branches over gain at {one}",
                        by_branches[most] / by_branches[one], 1.0),
        Target.at_most("tokens recomputed in all trees", recomputed, 0),
        Target.at_most("tokens recomputed after a fork at the head",
                       recomputed_after_fork(100, 100), 0),
        Target.at_most("tokens recomputed after a fork before it",
                       recomputed_after_fork(100, 50), 1),
    )  # fmt: skip
    return Report("paper_tables", (*memory, *saved, *gains, *trees), targets)


def memory_shares(data: Path, plan: Plan) -> list[Result]:
    """Plays more requests than fit, and reads how much of the pool held tokens."""
    results = []
    for policy in CONTESTANTS:
        outcome = _overload(data, plan, policy.name, 1)
        results.append(_share(MEMORY, policy.name, outcome.filled))
        if policy is SHARING:
            results.append(_share(MEMORY, "of allocated", outcome.filled_of_allocated))
    results += [
        _share(f"{MEMORY}, {PAPER}", name, share) for name, share in PUBLISHED_MEMORY.items()
    ]
    return results


def saved_by_sharing(plan: Plan) -> list[Result]:
    """Counts blocks of parallel samples and of beams, beside the published shares."""
    results = []
    for name, (num_in, num_out) in MEAN_LENGTHS.items():
        for width in WIDTHS:
            samples = saved_by_samples(num_in, num_out, width)
            results.append(_saved(f"{width} samples, {name}", OURS, [samples]))
            beams = [
                saved_by_beams(num_in, num_out, width, seed) for seed in range(plan.num_searches)
            ]
            results.append(_saved(f"{width} beams, {name}", OURS, beams))
    for (kind, name), shares in PUBLISHED_SAVED.items():
        for width, share in zip((WIDTHS[0], WIDTHS[-1]), shares, strict=True):
            results.append(_saved(f"{width} {kind}, {name}", PAPER, [share]))
    return results


def gains_of(data: Path, plan: Plan) -> list[Result]:
    """Compares throughput with the best of the reserving contestants, as requests get larger."""
    results = []
    for branches in plan.branches:
        gain = _gain(data, plan, branches, 1)
        results.append(Result.of(f"{branches} branches", OURS, GAIN, "1", [gain]))
        if branches in PUBLISHED_GAIN:
            published = [PUBLISHED_GAIN[branches]]
            results.append(Result.of(f"{branches} branches", PAPER, GAIN, "1", published))
    for divisor in plan.divisors:
        gain = _gain(data, plan, 1, divisor)
        results.append(Result.of(f"lengths divided by {divisor}", OURS, GAIN, "1", [gain]))
    return results


def tree_blocks(plan: Plan) -> tuple[list[Result], int]:
    """Builds the trees; returns their blocks, and the tokens that were run twice."""
    results, recomputed = [], 0
    for shape in plan.shapes:
        built = build(shape)
        recomputed += built.num_recomputed
        values: Mapping[str, tuple[str, float]] = {
            "blocks without sharing": ("blocks", shape.blocks_alone),
            "blocks held": ("blocks", built.blocks_held),
            "blocks saved": ("1", 1 - built.blocks_held / shape.blocks_alone),
            "tokens recomputed": ("tokens", built.num_recomputed),
            "the same, sharing whole blocks alone": ("tokens", shape.tail),
        }
        results += [
            Result.of(shape.name, OURS, metric, unit, [value])
            for metric, (unit, value) in values.items()
        ]
    return results, recomputed


def panels(report: Report) -> list[Bars]:
    """Prepares the plot: a panel per table."""

    def chosen(metric: str, workload: str = "") -> dict[str, float]:
        return {
            f"{result.workload}, {result.engine}".removeprefix(MEMORY).lstrip(", "): result.median
            for result in report.results
            if result.metric == metric and result.workload.startswith(workload)
        }

    return [
        Bars(MEMORY, "share", chosen("share of slots", MEMORY)),
        Bars("Blocks saved by sharing", "share", chosen("blocks saved by sharing")),
        Bars(GAIN, "times", chosen(GAIN)),
        Bars("Blocks saved in published trees", "share", chosen("blocks saved")),
    ]


def _gain(data: Path, plan: Plan, branches: int, divisor: int) -> float:
    ours = _overload(data, plan, SHARING.name, branches, divisor)
    theirs = _overload(data, plan, ORCA[-1].name, branches, divisor)
    return ours.tokens_per_second / theirs.tokens_per_second


def _overload(data: Path, plan: Plan, name: str, branches: int, divisor: int = 1) -> Outcome:
    policy = next(policy for policy in CONTESTANTS if policy.name == name)
    arrivals = azure_requests(data, Length(divisor, SETTING.longest), branches=branches)
    # One request's branches have to fit, whatever is reserved for them.
    fits = [
        arrival
        for arrival in arrivals
        if arrival.script.longest * branches <= SETTING.num_blocks * 8
    ]
    return play_requests(plan.rate, fits[: plan.num_requests], policy, SETTING)


def _share(workload: str, engine: str, value: float) -> Result:
    return Result.of(workload, engine, "share of slots", "1", [value])


def _saved(workload: str, engine: str, values: list[float]) -> Result:
    return Result.of(workload, engine, "blocks saved by sharing", "1", values)


if __name__ == "__main__":
    main()
