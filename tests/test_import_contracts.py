"""Who imports whom: the contracts hold, and layers below the model need no tensor library."""

import importlib.util
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from repository import ROOT, tracked_files

TENSOR_LIBRARIES = ("torch", "triton", "agentkv_kernels")


@pytest.mark.slow
def test_import_contracts_hold() -> None:
    """Catches an import that runs uphill or brings tensors or the wire where they do not belong."""
    command = Path(sysconfig.get_path("scripts"), "lint-imports")
    done = subprocess.run(
        [command, "--no-cache"], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    "modules",
    [
        [name for name in tracked_files("agentkv/core") if name.endswith(".py")],
        ["agentkv/engine/engine.py", "agentkv/engine/async_engine.py"],
    ],
    ids=["core", "engine"],
)
def test_layer_runs_without_tensor_libraries(modules: list[str]) -> None:
    """Catches a heavy import, direct or through others, in a layer whose tests need no model."""
    names = [
        name.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for name in modules
    ]
    script = (
        "import importlib, sys\n"
        f"sys.modules.update(dict.fromkeys({TENSOR_LIBRARIES!r}))\n"
        f"for name in {names!r}: importlib.import_module(name)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr


def test_kernels_is_not_ours() -> None:
    """Catches a package `kernels`, which would shadow the library that transformers looks for."""
    assert not (ROOT / "kernels/__init__.py").exists()
    spec = importlib.util.find_spec("kernels")
    if spec is not None and spec.origin is not None:
        assert not Path(spec.origin).is_relative_to(ROOT / "kernels")
