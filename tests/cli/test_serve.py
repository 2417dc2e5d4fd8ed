"""`agentkv serve`: options to configs, and a real server in front of a fake engine."""

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from cli.conftest import Invoke
from server.fake_engine import FakeEngine

from agentkv.cli import serve
from agentkv.config import EngineConfig, ServerConfig
from agentkv.engine.outputs import EngineView
from agentkv.errors import InvalidRequest, UnsupportedModelError


class StoppingEngine(FakeEngine):
    """Tells the process to stop as soon as it has been looked at."""

    async def view(self) -> EngineView:
        asyncio.get_running_loop().call_soon(os.kill, os.getpid(), signal.SIGTERM)
        return await super().view()


def test_serve_announces_itself_and_stops_on_a_signal(
    invoke: Invoke, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a READY line that scripts cannot find, or comes before the server answers."""
    lines: list[str] = []

    def assemble(
        config: EngineConfig, server: ServerConfig, report: Callable[[str], None]
    ) -> FakeEngine:
        report("Converting")
        lines.append(config.model)
        return StoppingEngine()

    monkeypatch.setattr(serve, "assemble", assemble)
    result = invoke("serve", "--model", "fake", "--port", "0")
    assert result.exit_code == 0, result.output
    assert lines == ["fake"]
    last = result.stdout.splitlines()[-1].split()
    assert last[0] == "READY"
    assert last[1].startswith("127.0.0.1:")
    assert "64 blocks of 16 tokens, 4 KiB each, 256 KiB in all" in result.stdout
    assert "1,024 distinct tokens" in result.stdout
    assert "nowhere: KV that gives way is recomputed" in result.stdout


def test_options_reach_the_engine(invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches an option that is accepted and changes nothing."""
    configs: list[EngineConfig] = []
    servers: list[ServerConfig] = []

    def assemble(
        config: EngineConfig, server: ServerConfig, report: Callable[[str], None]
    ) -> FakeEngine:
        configs.append(config)
        servers.append(server)
        raise UnsupportedModelError("Enough.")

    monkeypatch.setattr(serve, "assemble", assemble)
    result = invoke(
        *("serve", "--kv-memory", "1.5GiB", "--block-size", "8", "--max-length", "99"),
        *("--threads", "3", "--token-budget", "77", "--dtype", "bfloat16", "--device", "cuda:1"),
        *("--kv-dtype", "int8", "--no-graphs", "--fuse-weights", "--compile", "--batch-invariant"),
        *("--host-memory", "2GiB", "--disk-dir", "kv", "--disk-bytes", "3GiB"),
        *("--stream-interval", "0.5"),
    )
    assert result.exit_code == 1
    assert result.stderr.endswith("error: Enough.\n")
    (config,), (server,) = configs, servers
    assert server.stream_interval == 0.5
    assert (config.kv_memory, config.num_blocks, config.block_size) == (3 << 29, None, 8)
    assert (config.max_length, config.num_threads) == (99, 3)
    assert config.scheduler.token_budget == 77
    assert (config.dtype, config.device) == ("bfloat16", "cuda:1")
    assert (config.kv_dtype, config.graphs, config.fuse_weights) == ("int8", False, True)
    assert (config.compile, config.batch_invariant) == (True, True)
    assert config.memory_utilization is None
    assert (config.host_blocks, config.host_memory, config.host_kv_dtype) == (None, 2 << 30, "auto")
    assert (config.disk_dir, config.disk_bytes) == ("kv", 3 << 30)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--host", "0.0.0.0"], "reachable from other hosts"),
        (["--num-blocks", "4", "--kv-memory", "1GiB"], "set one of them"),
        (["--num-blocks", "0"], "num_blocks must be at least 1"),
        (["--port", "70000"], "port must be in"),
        (["--graphs"], "graphs are CUDA graphs; they need the device cuda"),
        (["--memory-utilization", "0.5"], "use kv_memory on a CPU"),
        (["--device", "cuda", "--memory-utilization", "1.5"], "must be in (0, 1], got 1.5"),
        (
            ["--device", "cuda", "--memory-utilization", "0.5", "--kv-memory", "1GiB"],
            "sizes the pool, as num_blocks and kv_memory do",
        ),
        (["--kv-dtype", "int4"], "kv_dtype must be auto, int8, fp8; got 'int4'"),
        (["--batch-invariant"], "equal to rounding, not to the bit"),
        (["--host-blocks", "-1"], "host_blocks must not be negative"),
        (["--host-blocks", "4", "--host-memory", "1GiB"], "both size the host tier"),
        (["--host-kv-dtype", "fp8"], "host_kv_dtype must be auto, int8"),
        (["--device", "cuda", "--host-kv-dtype", "int8"], "for the device cpu"),
        (["--disk-bytes", "1GiB"], "set disk_dir as well"),
        (["--disk-dir", "kv", "--host-blocks", "0"], "needs a host tier above it"),
    ],
)
def test_wrong_options_are_refused_before_loading(
    invoke: Invoke, monkeypatch: pytest.MonkeyPatch, options: list[str], said: str
) -> None:
    """Catches a mistake reported after a minute of loading, or as a traceback."""
    monkeypatch.delattr(serve, "assemble")
    result = invoke("serve", *options)
    assert result.exit_code == 1
    assert said in result.stderr
    assert result.stderr.count("\n") == 1


def test_a_size_that_is_none_is_a_usage_error(invoke: Invoke) -> None:
    """Catches a misspelt size that is taken for something else."""
    result = invoke("serve", "--kv-memory", "1Gib!")
    assert result.exit_code == 2
    assert "is no size" in result.stderr


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (
            ModuleNotFoundError("No.", name="torch"),
            "needs torch: install 'agentkv-runtime[server]'",
        ),
        (InvalidRequest("There is no model."), "There is no model."),
    ],
)
def test_a_failed_start_is_one_line(
    invoke: Invoke, monkeypatch: pytest.MonkeyPatch, error: Exception, said: str
) -> None:
    """Catches a traceback for a library or a model that is not there."""

    def assemble(
        config: EngineConfig, server: ServerConfig, report: Callable[[str], None]
    ) -> FakeEngine:
        raise error

    monkeypatch.setattr(serve, "assemble", assemble)
    result = invoke("serve")
    assert result.exit_code == 1
    assert said in result.stderr
    assert "Traceback" not in result.output


def test_a_module_of_our_own_that_is_missing_is_not_hidden(
    invoke: Invoke, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches our own packaging bug shown as something the user should install."""

    def assemble(
        config: EngineConfig, server: ServerConfig, report: Callable[[str], None]
    ) -> FakeEngine:
        raise ModuleNotFoundError("No.", name="agentkv.engine.nothing")

    monkeypatch.setattr(serve, "assemble", assemble)
    assert isinstance(invoke("serve").exception, ModuleNotFoundError)


def test_quotas_are_read_from_a_file(
    invoke: Invoke, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Catches a file of quotas that is not looked at, or whose fault is a traceback."""
    configs: list[EngineConfig] = []

    def assemble(
        config: EngineConfig, server: ServerConfig, report: Callable[[str], None]
    ) -> FakeEngine:
        configs.append(config)
        raise UnsupportedModelError("Enough.")

    monkeypatch.setattr(serve, "assemble", assemble)
    path = tmp_path / "quotas.toml"
    path.write_text("[default]\nblocks = 7\n")
    invoke("serve", "--quotas", str(path))
    assert configs[0].quotas.of("anybody").blocks == 7
    path.write_text("[default]\nbloks = 7\n")
    for wrong, said in ((path, "know no bloks"), (tmp_path / "none.toml", "Cannot read")):
        result = invoke("serve", "--quotas", str(wrong))
        assert result.exit_code == 1
        assert said in " ".join(result.stderr.split())
    assert len(configs) == 1
