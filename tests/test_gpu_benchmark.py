"""The benchmark for a GPU, rehearsed without one: tiny sizes, kernels in Triton's interpreter."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def run(*arguments: str, **environment: str) -> str:
    command = [sys.executable, "-W", "error", "-m", "benchmarks.gpu_attention", *arguments]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.mark.slow
def test_the_rehearsal_measures_everything(tmp_path: Path) -> None:
    """Catches a name, shape or option that would end the one run on a device it gets."""
    file = tmp_path / "report.json"
    shown = run("--rehearse", "--json", str(file), TRITON_INTERPRET="1", OMP_NUM_THREADS="1")
    assert "left out" not in shown
    report = json.loads(file.read_text(encoding="utf-8"))
    assert report["name"] == "gpu_attention"
    assert len(report["targets"]) == 4
    engines = {result["engine"] for result in report["results"]}
    assert {"tree", "flat", "predicted tree", "torch SDPA", "no graphs", "tree, int8 KV"} <= engines
    assert shown.rstrip().splitlines()[-1].startswith(("met", "MISSED"))  # the table comes last


@pytest.mark.slow
def test_without_a_device_nothing_is_measured() -> None:
    """Catches `make bench` failing where there is no GPU."""
    assert "no CUDA device" in run(CUDA_VISIBLE_DEVICES="", TRITON_INTERPRET="0")
