"""`agentkv serve`: load a model and serve it until told to stop.

It owns the options and what the terminal shows. Assembling an engine and serving it are called
in one place each; everything heavy is imported only when the command runs.
"""

import asyncio
import logging
import os
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.logging import RichHandler

from agentkv.cli.serve_summary import summarise
from agentkv.cli.sizes import parse_bytes
from agentkv.cli.tables import facts_table
from agentkv.config import (
    AdapterConfig,
    EngineConfig,
    LeaseConfig,
    PressureConfig,
    QuotasConfig,
    SchedulerConfig,
    ServerConfig,
    SnapshotConfig,
)
from agentkv.errors import InvalidRequest

if TYPE_CHECKING:
    from agentkv.server.served_engine import ServedEngine

SPIN_COUNT = "1000"
"""Rounds for which a thread of OpenMP spins before it sleeps: some microseconds."""


class LogLevel(StrEnum):
    """How much the log says."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


def _bytes(text: str) -> int:
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def _adapter(text: str) -> AdapterConfig:
    name, separator, path = text.partition("=")
    if not (separator and path):
        raise InvalidRequest(f"--adapter takes NAME=PATH, got {text!r}.")
    return AdapterConfig(name, path)


def serve(
    model: Annotated[
        str,
        typer.Option(
            "--model",
            "-m",
            help="A name that `agentkv models` lists, a folder of safetensors, a .gguf file, or "
            "owner/name on the Hugging Face Hub.",
        ),
    ] = "smollm2",
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0 takes a free one.")] = 50051,
    insecure: Annotated[
        bool,
        typer.Option(
            "--insecure", help="Serve other hosts too, although calls carry no credentials."
        ),
    ] = False,
    kv_memory: Annotated[
        int | None,
        typer.Option(
            parser=_bytes,
            metavar="SIZE",
            help="Memory of the pool, such as 1GiB. By default, on a CPU, a fifth of what is free, "
            "at most 4 GiB; on a GPU what --memory-utilization leaves.",
        ),
    ] = None,
    num_blocks: Annotated[
        int | None, typer.Option(help="Size of the pool in blocks, in place of --kv-memory.")
    ] = None,
    memory_utilization: Annotated[
        float | None,
        typer.Option(
            help="Share of a GPU's memory that weights, the largest step and the pool take "
            "together. By default 0.9."
        ),
    ] = None,
    block_size: Annotated[int, typer.Option(help="Tokens per block.")] = 16,
    max_length: Annotated[
        int | None, typer.Option(help="Most tokens of one context. By default the model's own.")
    ] = None,
    dtype: Annotated[
        str,
        typer.Option(
            help="float32, bfloat16, float16 or auto: float32 on a CPU, else the model's own."
        ),
    ] = "auto",
    kv_dtype: Annotated[
        str,
        typer.Option(
            help="What KV is stored as: auto, or on a GPU int8 or fp8, which hold about twice the "
            "tokens of 16 bits for some precision."
        ),
    ] = "auto",
    host_blocks: Annotated[
        int | None,
        typer.Option(
            help="Blocks in host memory for KV that leaves the pool; 0 recomputes it instead. By "
            "default as many as the pool has, if a fifth of the free memory holds them."
        ),
    ] = None,
    host_memory: Annotated[
        int | None,
        typer.Option(
            parser=_bytes, metavar="SIZE", help="The same as a size, in place of --host-blocks."
        ),
    ] = None,
    host_kv_dtype: Annotated[
        str,
        typer.Option(
            help="What KV is kept as on the host and on disk: auto, which is exact, or on a CPU "
            "int8, a quarter of float32, rounded."
        ),
    ] = "auto",
    disk_dir: Annotated[
        str | None, typer.Option(help="Folder for KV that leaves the host. By default none.")
    ] = None,
    disk_bytes: Annotated[
        int | None,
        typer.Option(
            parser=_bytes, metavar="SIZE", help="Most bytes in --disk-dir. By default 4GiB."
        ),
    ] = None,
    device: Annotated[str, typer.Option(help="Where to compute: cpu, cuda, cuda:1, ...")] = "cpu",
    weights: Annotated[
        str,
        typer.Option(
            help="What weights are kept as on a CPU: fp32, bf16, int8 or auto: int8 where native "
            "kernels were compiled and the model is large enough to gain."
        ),
    ] = "auto",
    adapters: Annotated[
        list[str] | None,
        typer.Option(
            "--adapter",
            metavar="NAME=PATH",
            help="LoRA adapter that contexts may be created with: a folder as PEFT saves it. May "
            "be given several times.",
        ),
    ] = None,
    threads: Annotated[
        int | None, typer.Option(help="Threads to compute with. By default one per core.")
    ] = None,
    token_budget: Annotated[int, typer.Option(help="Most tokens computed by one step.")] = 512,
    speculate: Annotated[
        int,
        typer.Option(
            help="Most tokens that a step guesses ahead from the text before, and checks at once; "
            "0 leaves it to clients that ask. Guesses change how fast tokens come, and not which."
        ),
    ] = 0,
    lease_ttl: Annotated[
        float, typer.Option(help="Seconds without use after which a lease expires by default.")
    ] = 3600.0,
    max_lease_ttl: Annotated[
        float, typer.Option(help="Most seconds a client may ask a lease for.")
    ] = 86_400.0,
    pin_quota: Annotated[
        float, typer.Option(help="Share of the pool, from 0 to 1, that one tenant may pin.")
    ] = 0.5,
    handle_retention: Annotated[
        float,
        typer.Option(help="Seconds without use after which a context is released with its tokens."),
    ] = 86_400.0,
    soft_pressure: Annotated[
        float,
        typer.Option(help="Share of blocks held by contexts from which pressure is SOFT."),
    ] = 0.75,
    hard_pressure: Annotated[
        float,
        typer.Option(
            help="Share of blocks held by running requests and pins from which it is HARD."
        ),
    ] = 0.9,
    watermark: Annotated[
        int, typer.Option(help="Free blocks that are kept for requests that run already.")
    ] = 0,
    graphs: Annotated[
        bool | None,
        typer.Option(
            "--graphs/--no-graphs",
            help="Whether steps of decoding run as CUDA graphs. By default on a GPU.",
        ),
    ] = None,
    fuse_weights: Annotated[
        bool | None,
        typer.Option(
            "--fuse-weights/--no-fuse-weights",
            help="Whether q, k and v, and gate and up, are one matrix product each. By default on "
            "a GPU.",
        ),
    ] = None,
    compile_: Annotated[
        bool,
        typer.Option(
            "--compile", help="Compile the model with torch.compile, which takes minutes at start."
        ),
    ] = False,
    batch_invariant: Annotated[
        bool,
        typer.Option(
            "--batch-invariant",
            help="Make a branch's logits independent of what runs beside it, to the bit; on a GPU, "
            "and slower: every step is padded to --token-budget.",
        ),
    ] = False,
    stream_interval: Annotated[
        float | None,
        typer.Option(
            help="Least seconds between two messages of a stream; tokens in between share one. By "
            "default 0 for up to 8 streams, then 0.004 for each stream there is, at most 0.2."
        ),
    ] = None,
    quotas: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="TOML file of what a tenant may hold and use: blocks, block_seconds in window "
            "seconds, contexts, depth, fan_out; a table default, and tenants.NAME with what "
            "differs. By default no limits beyond the server's own.",
        ),
    ] = None,
    snapshot_dir: Annotated[
        str | None,
        typer.Option(
            metavar="FOLDER",
            help="Where clients may save contexts, to be restored after a restart. By default "
            "nowhere: Save and Restore are refused.",
        ),
    ] = None,
    snapshot_bytes: Annotated[
        int | None,
        typer.Option(
            parser=_bytes,
            metavar="SIZE",
            help="Disk space that the snapshots of one tenant may take. By default 16GiB.",
        ),
    ] = None,
    log_level: Annotated[LogLevel, typer.Option(help="How much to log.")] = LogLevel.WARNING,
) -> None:
    """Serve a model until Ctrl-C.

    Prints what was loaded and how many tokens fit, then a line **READY host:port** once calls are
    accepted.
    """
    messages = Console(stderr=True)
    logging.basicConfig(
        level=log_level.upper(), format="%(message)s", handlers=[RichHandler(console=messages)]
    )
    # Both are checked before the model is loaded, which takes seconds.
    server = ServerConfig(host=host, port=port, insecure=insecure, stream_interval=stream_interval)
    engine = EngineConfig(
        model=model,
        dtype=dtype,
        device=device,
        weights=weights,
        adapters=tuple(_adapter(text) for text in adapters or ()),
        block_size=block_size,
        num_blocks=num_blocks,
        kv_memory=kv_memory,
        memory_utilization=memory_utilization,
        kv_dtype=kv_dtype,
        host_blocks=host_blocks,
        host_memory=host_memory,
        host_kv_dtype=host_kv_dtype,
        disk_dir=disk_dir,
        disk_bytes=disk_bytes,
        graphs=graphs,
        fuse_weights=fuse_weights,
        compile=compile_,
        batch_invariant=batch_invariant,
        max_length=max_length,
        num_threads=threads,
        scheduler=SchedulerConfig(
            token_budget=token_budget, watermark=watermark, num_speculative_tokens=speculate
        ),
        leases=LeaseConfig(
            default_ttl=lease_ttl,
            max_ttl=max_lease_ttl,
            pin_quota=pin_quota,
            handle_retention=handle_retention,
        ),
        pressure=PressureConfig(soft=soft_pressure, hard=hard_pressure),
        quotas=QuotasConfig() if quotas is None else read_quotas(quotas),
        snapshots=SnapshotConfig(
            dir=snapshot_dir, max_bytes=snapshot_bytes or SnapshotConfig().max_bytes
        ),
    )
    wait_briefly()
    with messages.status(f"Loading {model} ...") as spinner:
        served = assemble(engine, server, lambda line: spinner.update(f"{line} ..."))
    asyncio.run(announce_and_serve(served, server, Console()))


def wait_briefly() -> None:
    """Lets torch's threads spin for a few microseconds while they wait, then sleep.

    Their OpenMP reads it once, when torch is imported. By default they spin for milliseconds, and
    stall a step whenever anything else needs their core, as the server's own loop does. What the
    environment says of it stays.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)


def read_quotas(path: Path) -> QuotasConfig:
    """Reads the file of quotas.

    Raises:
        InvalidRequest: It cannot be read, or is wrong.
    """
    try:
        return QuotasConfig.read(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"Cannot read the quotas in {path}: {error}.") from None


def assemble(
    config: EngineConfig, server: ServerConfig, report: Callable[[str], None]
) -> "ServedEngine":
    """Loads a model and makes the engine that is served.

    Args:
        config: The model, and with what means to serve it.
        server: How streams are paced.
        report: Called with a line before anything that takes long.
    """
    from agentkv.engine.async_engine import AsyncEngine
    from agentkv.engine.build import build_engine

    return AsyncEngine(build_engine(config, report), stream_interval=server.stream_interval)


async def announce_and_serve(
    engine: "ServedEngine", config: ServerConfig, console: Console
) -> None:
    """Serves until a signal comes; prints a summary and READY once calls are accepted."""
    from agentkv.server.main import serve as serve_engine

    async with asyncio.TaskGroup() as tasks:

        def announce(address: str) -> None:
            tasks.create_task(show(address))

        async def show(address: str) -> None:
            console.print(facts_table(summarise(await engine.view(), address)))
            console.print(f"READY {address}", highlight=False, soft_wrap=True)

        await serve_engine(engine, config, on_ready=announce)
