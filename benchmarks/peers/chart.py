"""One picture of a run: tokens a second, a group of bars for each workload."""

from collections.abc import Sequence
from pathlib import Path

from benchmarks.report import Result


def draw(results: Sequence[Result], path: Path) -> None:
    """Writes a PNG of the medians with their spread.

    Raises:
        SystemExit: matplotlib is not installed.
    """
    try:
        # Only the picture needs it, so only the picture asks for it.
        from matplotlib.figure import Figure
    except ImportError:
        raise SystemExit("--png needs matplotlib: pip install '.[bench]'") from None
    shown = [result for result in results if result.metric == "decoded"]
    workloads = list(dict.fromkeys(result.workload for result in shown))
    engines = list(dict.fromkeys(result.engine for result in shown))
    figure = Figure(figsize=(1.5 + 1.6 * len(workloads), 4.5), layout="constrained")
    axes = figure.subplots()
    width = 0.85 / len(engines)
    for number, engine in enumerate(engines):
        own = [result for result in shown if result.engine == engine]
        places = [workloads.index(result.workload) + number * width for result in own]
        medians = [result.median for result in own]
        spread = [[r.median - r.min for r in own], [r.max - r.median for r in own]]
        axes.bar(places, medians, width, yerr=spread, label=engine)
    axes.set_xticks(
        [i + 0.425 - width / 2 for i in range(len(workloads))], workloads, rotation=30, ha="right"
    )
    axes.set_ylabel("tokens per second, all branches")
    axes.legend()
    figure.savefig(path, dpi=150)
