"""Runs the tests of the runner on the Triton kernels in Triton's interpreter, in one process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent / "interpreted"


@pytest.mark.slow
def test_the_runner_in_the_interpreter() -> None:
    """Catches a runner that is right on a CPU and wrong on a GPU; see the tests it runs."""
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "--durations=5", str(FOLDER)]
    root = Path(__file__).parents[2]
    done = subprocess.run(
        command, env=environment, cwd=root, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
