"""What every benchmark says at the end: a table to read and a JSON file to keep.

It knows figures, targets and the machine; it measures nothing itself.
"""

import argparse
import importlib.metadata
import json
import os
import platform
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

DISTRIBUTIONS = ("torch", "transformers", "triton", "grpcio")


@dataclass(frozen=True, slots=True)
class Result:
    """One measured figure of one engine under one workload."""

    workload: str
    engine: str
    metric: str
    unit: str
    median: float
    min: float
    max: float

    @classmethod
    def of(
        cls, workload: str, engine: str, metric: str, unit: str, values: Sequence[float]
    ) -> "Result":
        """Sums up repeated measurements; at least one value."""
        median = statistics.median(values)
        return cls(workload, engine, metric, unit, median, min(values), max(values))


@dataclass(frozen=True, slots=True)
class Target:
    """What a figure was meant to be."""

    name: str
    value: float
    target: float
    met: bool

    @classmethod
    def at_most(cls, name: str, value: float, target: float) -> "Target":
        """A figure that is good when small."""
        return cls(name, value, target, value <= target)

    @classmethod
    def at_least(cls, name: str, value: float, target: float) -> "Target":
        """A figure that is good when large."""
        return cls(name, value, target, value >= target)


@dataclass(frozen=True, slots=True)
class Machine:
    """Where it was measured."""

    cpu: str
    cores: int
    """Cores this process may use."""
    memory_bytes: int
    gpu: str | None = None

    @classmethod
    def here(cls, gpu: str | None = None) -> "Machine":
        """Describes this machine; the name of a GPU is the benchmark's to find out."""
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return cls(_cpu_model(), len(os.sched_getaffinity(0)), memory, gpu)


def versions() -> dict[str, str]:
    """Versions of Python and of the libraries that decide how fast it is."""
    found = {"python": platform.python_version()}
    for name in DISTRIBUTIONS:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue  # the client's environment lacks most of them
    return found


@dataclass(frozen=True, slots=True)
class Report:
    """One benchmark's answer."""

    name: str
    results: tuple[Result, ...]
    targets: tuple[Target, ...] = ()
    machine: Machine = field(default_factory=Machine.here)
    versions: dict[str, str] = field(default_factory=versions)

    def publish(self, path: Path | None) -> None:
        """Prints one table, and writes the JSON file if one is asked for."""
        self.print()
        if path is not None:
            self.write(path)

    def write(self, path: Path) -> None:
        """Writes the report as JSON; replaces what was there."""
        path.write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")

    def print(self) -> None:
        """Prints the machine, one table of figures and one line for each target."""
        machine = self.machine
        gpu = f", {machine.gpu}" if machine.gpu else ""
        print(f"{self.name}: {machine.cpu}, {machine.cores} cores, "
              f"{machine.memory_bytes / 2**30:.0f} GiB{gpu}")  # fmt: skip
        print(", ".join(f"{name} {version}" for name, version in self.versions.items()))
        rows = [
            (
                r.workload,
                r.engine,
                r.metric,
                _number(r.median),
                _number(r.min),
                _number(r.max),
                r.unit,
            )
            for r in self.results
        ]
        _print_table([("workload", "engine", "metric", "median", "min", "max", "unit"), *rows])
        for target in self.targets:
            verdict = "met" if target.met else "MISSED"
            print(f"{verdict}: {target.name}: {target.value:.4g}, target {target.target:.4g}")


def parser_for(documentation: str) -> argparse.ArgumentParser:
    """Makes a benchmark's command line: its module's first line, and the option all have."""
    parser = argparse.ArgumentParser(description=documentation.splitlines()[0])
    parser.add_argument("--json", type=Path, help="where to write the report")
    return parser


def _print_table(rows: Sequence[Sequence[str]]) -> None:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        print("  ".join(cells).rstrip())


def _number(value: float) -> str:
    return f"{value:.4g}"


def _cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
