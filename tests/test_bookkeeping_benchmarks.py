"""The benchmarks of the bookkeeping still run, and write what their readers expect."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_engines import TinyEngine
from tiny_models import build_tiny_model

from benchmarks import fork, sampling, waste

FIELDS = {"workload", "engine", "metric", "unit", "median", "min", "max"}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "main"), [("fork", fork.main), ("waste", waste.main)])
def test_a_quick_run_writes_its_report(
    name: str, main: Callable[[], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a benchmark that the engine has moved away from."""
    path = tmp_path / "report.json"
    monkeypatch.setattr(sys, "argv", [name, "--quick", "--json", str(path)])
    main()
    report: dict[str, Any] = json.loads(path.read_text())
    assert report["name"] == name
    assert report["results"] and all(set(result) == FIELDS for result in report["results"])
    assert report["targets"]


def test_a_fork_takes_no_block_and_copies_nothing() -> None:
    """Catches a fork that allocates: the counts of the benchmark are exact, its times are not."""
    report = fork.measure(fork.QUICK)
    counted = {target.name: target.value for target in report.targets}
    assert (counted["blocks taken"], counted["bytes copied"]) == (0, 0)


@pytest.mark.slow
def test_each_sampling_option_is_timed() -> None:
    """Catches an option that the sampler takes no more, or a report without its targets."""
    model = build_tiny_model("llama", vocab_size=32_768)
    tiny = TinyEngine(model, num_blocks=256, end_token_ids=[2])
    report = sampling.measure(tiny.engine, torch.randn(16, 32_768), sampling.QUICK)
    listed = [result.metric for result in report.results]
    assert listed == ["greedy step", *sampling.OPTIONS, "JSON schema, greedy"]
    assert len(report.targets) == 2
