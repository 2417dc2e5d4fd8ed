"""Draws what a benchmark found as a PNG. It needs the extra `bench`, and computes nothing."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple


class Bars(NamedTuple):
    """One figure per name."""

    title: str
    unit: str
    values: Mapping[str, float]


class Lines(NamedTuple):
    """Values over time, a line per name."""

    title: str
    unit: str
    values: Mapping[str, Sequence[tuple[float, float]]]


POINTS = 400
"""Most points of a line."""


def draw(panels: Sequence[Bars | Lines], path: Path) -> None:
    """Writes the panels below one another.

    Raises:
        SystemExit: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure  # an extra: benchmarks run without a plot
    except ImportError:
        raise SystemExit("A plot needs matplotlib: pip install 'agentkv-runtime[bench]'.") from None
    heights = [1 + 0.22 * len(panel.values) if isinstance(panel, Bars) else 3.2 for panel in panels]
    figure = Figure(figsize=(11, sum(heights)), layout="constrained")
    rows = figure.subplots(len(panels), squeeze=False, height_ratios=heights)[:, 0]
    for axes, panel in zip(rows, panels, strict=True):
        axes.set_title(panel.title)
        if isinstance(panel, Bars):
            names = list(panel.values)
            bars = axes.barh(names, [panel.values[name] for name in names])
            axes.bar_label(bars, fmt="%.3g")
            axes.invert_yaxis()
            axes.set_xlabel(panel.unit)
        else:
            for name, points in panel.values.items():
                some = points[:: max(1, len(points) // POINTS)]
                axes.plot([time for time, _ in some], [value for _, value in some], label=name)
            axes.set_xlabel("seconds")
            axes.set_ylabel(panel.unit)
            axes.legend(fontsize="small")
    figure.savefig(path, dpi=110)
