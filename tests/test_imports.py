"""Who imports whom: contracts hold, the client stays light, core and engine need no tensors."""

import importlib.util
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from repository import ROOT, tracked_files

HEAVY = ("torch", "transformers", "triton", "numpy", "tokenizers", "rich", "typer", "click")
TENSOR_LIBRARIES = ("torch", "triton", "agentkv_kernels")


def loaded(code: str) -> set[str]:
    """Runs code in a new interpreter and lists the top-level modules it has loaded."""
    done = subprocess.run(
        [sys.executable, "-c", f"import sys\n{code}\nprint(*sys.modules)"],
        cwd=ROOT,
        env={"PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def test_importing_agentkv_loads_next_to_nothing() -> None:
    """Catches gRPC or torch loaded by every part of AgentKV, core included."""
    modules = loaded("import agentkv")
    assert not modules & {*HEAVY, "grpc", "google.protobuf"}


@pytest.mark.slow
def test_the_client_needs_only_the_wire() -> None:
    """Catches a client that cannot be used without torch, or drags in the command line."""
    modules = loaded("import agentkv\nfor name in agentkv.__all__: getattr(agentkv, name)")
    assert "grpc" in modules
    assert not modules & set(HEAVY)
    assert not {name for name in modules if name.startswith(("agentkv.core", "agentkv.engine"))}


@pytest.mark.slow
def test_the_command_line_needs_no_torch() -> None:
    """Catches `agentkv tree` that takes seconds to start, or fails on a client's machine."""
    modules = loaded("from agentkv.cli import app")
    assert "typer" in modules
    assert not modules & {"torch", "transformers", "triton", "numpy", "tokenizers"}


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
