"""Runs the tests of the Triton kernels in Triton's interpreter, a process for each file."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent / "interpreted"
FILES = sorted(path.name for path in FOLDER.glob("test_*.py"))


@pytest.mark.slow
@pytest.mark.parametrize("file", FILES)
def test_in_the_interpreter(file: str) -> None:
    """Catches kernels that compute something else than the specification; see the file's tests."""
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "--durations=5", str(FOLDER / file)]
    root = Path(__file__).parents[2]
    done = subprocess.run(
        command, env=environment, cwd=root, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
