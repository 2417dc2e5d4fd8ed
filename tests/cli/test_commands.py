"""The command itself: help, version, models, sizes, and what it says when libraries lack."""

import sys
from pathlib import Path

import pytest
from cli.conftest import Invoke

from agentkv.cli import main
from agentkv.cli.models import describe
from agentkv.cli.sizes import format_bytes, parse_bytes
from agentkv.model.architectures import Refusal
from agentkv.model.catalog import ALIASES, CatalogEntry
from agentkv.model.gguf_source import GgufSource


@pytest.mark.parametrize("command", ["serve", "tree", "info", "models"])
def test_every_command_has_help(command: str, invoke: Invoke) -> None:
    """Catches an option nobody explained, or a command that is not registered."""
    result = invoke(command, "--help")
    assert result.exit_code == 0
    assert f"agentkv {command} [OPTIONS]" in result.stdout


def test_version(invoke: Invoke) -> None:
    """Catches a crash where the package runs from a checkout."""
    result = invoke("--version")
    assert result.exit_code == 0
    assert result.stdout.startswith("agentkv")


def test_models_lists_every_alias(invoke: Invoke) -> None:
    """Catches an alias that nobody can find."""
    result = invoke("models")
    assert result.exit_code == 0, result.output
    for alias in ALIASES.values():
        assert alias.name in result.stdout
        assert alias.license in result.stdout


def test_supported_architectures_are_printed_with_reasons(invoke: Invoke) -> None:
    """Catches a list that names what is proven and keeps still about what is refused, and why."""
    result = invoke("models", "--supported")
    assert result.exit_code == 0
    text = " ".join(result.output.split())
    assert "Proven (31): cohere, cohere2, deepseek_v2" in text
    assert f"{Refusal.OTHER_LAYERS}: axk2" in text
    assert "Others are tried: at load, the golden check" in text


def test_models_say_what_a_start_would_do() -> None:
    """Catches a download announced as a file that is there."""
    alias = ALIASES["smollm2"]
    assert describe(CatalogEntry(alias, Path("/models/x"), 3 << 20, None)).startswith(
        "ready, 3 MiB"
    )
    assert describe(CatalogEntry(alias, None, 0, GgufSource.of(Path("a.gguf")))).startswith(
        "converted"
    )
    assert alias.hub_id in describe(CatalogEntry(alias, None, 0, None))


@pytest.mark.parametrize(
    ("text", "count"),
    [("7", 7), ("1GiB", 2**30), (" 1.5 mib ", 3 << 19), ("2GB", 2 * 10**9), ("10B", 10)],
)
def test_sizes_are_read(text: str, count: int) -> None:
    """Catches a decimal unit taken for a binary one."""
    assert parse_bytes(text) == count


@pytest.mark.parametrize("text", ["", "GiB", "1 XB", "-1GiB", "1,5GiB", "1e9"])
def test_what_is_no_size_is_refused(text: str) -> None:
    """Catches a misspelt size that becomes a tiny pool."""
    with pytest.raises(ValueError, match="1GiB"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (2**30, "1 GiB"), (500 << 20, "500 MiB")],
)
def test_sizes_are_written(count: int, text: str) -> None:
    """Catches a size off by a unit."""
    assert format_bytes(count) == text


def test_the_base_install_says_what_the_command_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a traceback as the first thing that a user of the client alone sees."""
    for name in [name for name in sys.modules if name.startswith("agentkv.cli.")]:
        if name != "agentkv.cli.main":
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "typer", None)
    with pytest.raises(SystemExit, match=r"needs typer; install 'agentkv-runtime\[cli\]'"):
        main.main()
