"""The launchers of the Triton kernels, as far as they go without a device."""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]


@pytest.mark.slow
def test_every_launch_binds_and_compiles(tmp_path: Path) -> None:
    """Catches an argument missing, out of order or of a type that only the interpreter takes."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    done = subprocess.run(
        [sys.executable, str(TESTS / "unlaunched_kernels.py")],
        env=environment,
        cwd=TESTS.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert Counter(json.loads(done.stdout)) == {
        "tree_attention_kernel": 8,  # two tile classes each time
        "merge_kernel": 4,
        "store_kv_kernel": 3,
        "copy_blocks_kernel": 1,
    }
