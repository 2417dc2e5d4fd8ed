"""What importing loads: the client stays light, and `kernels` is nobody's package."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
HEAVY = ("torch", "transformers", "triton", "numpy", "tokenizers", "rich", "typer", "click")


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


def test_kernels_is_no_package() -> None:
    """Catches a module that shadows the library `kernels`, which transformers imports."""
    assert not (ROOT / "kernels" / "__init__.py").exists()
