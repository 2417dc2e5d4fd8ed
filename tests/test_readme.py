"""What the documents say is so: commands exist, the example runs, the tree of files is whole."""

import asyncio
import re
import subprocess
import sysconfig
from pathlib import Path

import pytest
from repository import ROOT, lines_of, tracked_files
from tiny_engines import load_tiny

from agentkv.config import EngineConfig, QuotasConfig, ServerConfig, SnapshotConfig
from agentkv.engine.async_engine import AsyncEngine
from agentkv.engine.build import build_engine_for
from agentkv.server.main import Server

README = (ROOT / "README.md").read_text(encoding="utf-8")
DOCUMENTS = ["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md", "kernels/README.md"]
TREE_FOLDERS = ["agentkv", "kernels", "examples", "benchmarks"]
ENTRY = re.compile(r"(?P<indent>(?:│   |    )*)[├└]── (?P<name>\S+)(?P<comment>.*)")


def blocks(language: str) -> list[str]:
    """Lists the fenced blocks of one language in the README."""
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


def targets() -> set[str]:
    """Lists the Makefile's targets."""
    return set(re.findall(r"^([a-z]+):", "\n".join(lines_of("Makefile")), re.MULTILINE))


def commands() -> list[str]:
    """Lists the commands that the README tells a reader to run."""
    lines = "".join(blocks("console")).splitlines()
    return [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]


def tree() -> dict[str, str]:
    """Reads the README's tree of files: path to comment."""
    found: dict[str, str] = {}
    folders: list[str] = []
    (block,) = re.findall(r"<!-- tree -->\n```\n(.*?)```", README, re.DOTALL)
    for line in block.splitlines():
        entry = ENTRY.match(line)
        depth = 0 if entry is None else len(entry["indent"]) // 4 + 1
        name, comment = (
            line.split(maxsplit=1) if entry is None else (entry["name"], entry["comment"].strip())
        )
        folders[depth:] = [name]
        found["".join(folders)] = comment
    return found


def test_tree_lists_every_file_once_with_a_comment() -> None:
    """Catches a file that was added, moved or removed without a word in the README."""
    listed = {path: comment for path, comment in tree().items() if not path.endswith("/")}
    there = {
        name for name in tracked_files(*TREE_FOLDERS) if not name.startswith("benchmarks/results/")
    }
    assert sorted(there - set(listed)) == [], "not in the README's tree"
    assert sorted(set(listed) - there) == [], "in the README's tree and nowhere else"
    assert [path for path, comment in tree().items() if not comment] == []


def test_commands_exist() -> None:
    """Catches a command that was renamed after it was written down."""
    script = Path(sysconfig.get_path("scripts"), "agentkv")
    for command in commands():
        program, *arguments = command.split()
        if program == "make":
            assert set(arguments) <= targets(), command
        elif Path(program).name == "agentkv":
            done = subprocess.run(
                [script, arguments[0], "--help"], capture_output=True, text=True, timeout=60
            )
            assert done.returncode == 0, f"{command}: {done.stderr}"
        else:
            pytest.fail(f"nobody checks this command: {command}")


@pytest.mark.parametrize("document", DOCUMENTS)
def test_what_a_document_names_exists(document: str) -> None:
    """Catches a path or a target that a document still names after it is gone."""
    text = "\n".join(lines_of(document))
    paths = re.findall(r"`((?:agentkv|kernels|tests|examples|benchmarks|protos)/[\w./]*)`", text)
    paths += re.findall(r"\]\(([\w./]+)\)", text)
    assert [path for path in paths if not (ROOT / path).exists()] == []
    assert set(re.findall(r"`make ([a-z]+)", text)) <= targets()


@pytest.mark.slow
def test_examples_run(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Catches an example that no longer fits the SDK, against a real server on a tiny model."""
    examples = blocks("python")
    assert all('"127.0.0.1:50051"' in code for code in examples)

    async def scenario() -> None:
        snapshots = SnapshotConfig(dir=str(tmp_path))
        engine = build_engine_for(load_tiny(), EngineConfig(num_blocks=64, snapshots=snapshots))
        async with Server(AsyncEngine(engine), ServerConfig(port=0)) as server:
            for code in examples:
                local = code.replace("127.0.0.1:50051", server.address)
                await asyncio.to_thread(exec, compile(local, "README.md", "exec"), {})
        assert engine.observer.pool().live == 0, "an example left contexts behind"

    asyncio.run(scenario())
    said = capsys.readouterr().out.splitlines()
    for expected in (
        r"\d+ blocks shared, \d+ of its own",
        r"\d+ tokens computed, \d+ reused",
        r"[\d.]+ block-seconds; sharing saved [\d.]+",
        r"3 contexts, \d+ distinct tokens, \d+ bytes",
        r"\[\d+, \d+, \d+\] \d+ tokens of KV came back",
        r"tool_call weather \{'city': .*\}",
    ):
        assert any(re.fullmatch(expected, line) for line in said), expected


def test_examples_are_short() -> None:
    """Catches an example that grows until nobody reads it."""
    for code in blocks("python"):
        assert len([line for line in code.splitlines() if line.strip()]) <= 20


def test_quotas_can_be_read() -> None:
    """Catches a key of the quotas that is written down and does not exist."""
    (text,) = blocks("toml")
    quotas = QuotasConfig.read(text)
    assert quotas.of("alice").blocks == 8000
    assert quotas.of("alice").fan_out == quotas.of("bob").fan_out
