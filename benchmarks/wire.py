"""What a message costs on the way to its reader: processor time of server and client.

    python -m benchmarks.wire [--json FILE] [--messages N] [--period MS]

An engine without a model steps 16 branches, as slowly as a model on this machine would, and sleeps
in between, so that what server and client compute is the wire and bookkeeping alone. Beside it, in
turn: bare gRPC (`grpc.aio` on both ends) with messages of the same size at the same pace, which is
the floor; and the same engine stepped in process, whose time is taken off the server's.
"""

import argparse
import asyncio
import contextlib
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import grpc.aio

from agentkv.client.async_client import AsyncClient
from agentkv.config import ServerConfig
from agentkv.core.batch import Batch, StepResult
from agentkv.engine.async_engine import AsyncEngine
from agentkv.engine.engine import Engine
from agentkv.sampling_params import SamplingParams
from agentkv.server.main import serve
from benchmarks.hollow_runner import HollowRunner, hollow_engine
from benchmarks.report import Report, Result, parser_for

TENANT = "tenant"
NUM_BRANCHES = 16
MESSAGE_BYTES = 205
"""Of a step of so many branches, a token each."""
METHOD = "/floor.Floor/Stream"
NUM_REPEATS = 3


class SlowRunner(HollowRunner):
    """Answers once a model would."""

    def __init__(self, period: float) -> None:
        super().__init__()
        self._period = period

    def run(self, batch: Batch, meanwhile: Callable[[], None]) -> StepResult:
        """Sleeps for the time of a step, Python's lock free as in a native kernel."""
        result = super().run(batch, meanwhile)
        time.sleep(self._period)
        return result


def main() -> None:
    """Measures all three in turn and publishes, or serves one of them."""
    options = _parse()
    if options.serve is not None:
        asyncio.run(_serve_bare(options) if options.serve == "bare" else _serve_agentkv(options))
        return
    found: dict[tuple[str, str], list[float]] = {}
    for _ in range(NUM_REPEATS):
        stepped = _stepped(options)
        bare, ours = _served("bare", _read_bare, options), _served("agentkv", _read_ours, options)
        for key, value in (
            (("in process", "engine"), stepped),
            (("bare gRPC", "server"), bare[0]),
            (("bare gRPC", "client"), bare[1]),
            (("agentkv", "server, without the engine"), ours[0] - stepped),
            (("agentkv", "client"), ours[1]),
        ):
            found.setdefault(key, []).append(value)
    workload = f"{NUM_BRANCHES} branches, a message every {options.period:g} ms"
    results = [
        Result.of(workload, engine, f"{part}, per message", "ms", values)
        for (engine, part), values in found.items()
    ]
    Report("wire", tuple(results)).publish(options.json)


def _engine(options: argparse.Namespace) -> Engine:
    return hollow_engine(
        SlowRunner(options.period / 1e3), num_blocks=4096, max_length=options.messages + 1024
    )


def _params(options: argparse.Namespace) -> SamplingParams:
    return SamplingParams(max_tokens=options.messages, ignore_eos=True)


def _stepped(options: argparse.Namespace) -> float:
    """Returns milliseconds of this process a step takes, branches decoding."""
    engine = _engine(options)
    root = engine.run(engine.contexts.create(TENANT, range(64))).answer.context
    generation = engine.inference.generate_branches(TENANT, root.id, NUM_BRANCHES, _params(options))
    begun = time.process_time()
    while not generation.is_done:
        engine.step()
        generation.take_news()
    num_messages: int = options.messages
    return 1e3 * (time.process_time() - begun) / num_messages


def _served(
    name: str, read: Callable[[str, int], Any], options: argparse.Namespace
) -> tuple[float, float]:
    """Returns milliseconds of server and client a message takes."""
    command = [sys.executable, "-m", "benchmarks.wire", "--serve", name]
    command += ["--messages", str(options.messages), "--period", str(options.period)]
    with _running(command) as (server, address):
        before, begun = _cpu_seconds(server.pid), time.process_time()
        asyncio.run(read(address, options.messages))
        client, theirs = time.process_time() - begun, _cpu_seconds(server.pid) - before
    return 1e3 * theirs / options.messages, 1e3 * client / options.messages


@contextlib.contextmanager
def _running(command: list[str]) -> Iterator[tuple[subprocess.Popen[str], str]]:
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        yield server, server.stdout.readline().strip()
    finally:
        server.terminate()
        server.wait(timeout=30)


def _cpu_seconds(pid: int) -> float:
    """Sums what every thread of a process has run; Linux's scheduler counts nanoseconds."""
    threads = Path(f"/proc/{pid}/task").iterdir()
    nanoseconds = sum(int((one / "schedstat").read_text().split()[0]) for one in threads)
    return nanoseconds / 1e9


async def _read_ours(address: str, num_messages: int) -> None:
    async with AsyncClient(address) as client:
        root = await client.create(token_ids=range(64))
        stream = root.generate_branches(NUM_BRANCHES, max_tokens=num_messages, ignore_eos=True)
        async with stream:
            async for _ in stream:
                pass


async def _read_bare(address: str, num_messages: int) -> None:
    async with grpc.aio.insecure_channel(address) as channel:
        call: Any = channel.unary_stream(METHOD)
        stream = call(b"")
        num_read = 0
        async for _ in stream:
            num_read += 1
    assert num_read == num_messages


async def _serve_agentkv(options: argparse.Namespace) -> None:
    engine = AsyncEngine(_engine(options))
    await serve(engine, ServerConfig(port=0), on_ready=lambda address: print(address, flush=True))


async def _serve_bare(options: argparse.Namespace) -> None:
    async def stream(request: bytes, context: Any) -> AsyncIterator[bytes]:
        for _ in range(options.messages):
            await asyncio.sleep(options.period / 1e3)
            yield bytes(MESSAGE_BYTES)

    service, _, method = METHOD.strip("/").partition("/")
    handlers: dict[str, Any] = {method: grpc.unary_stream_rpc_method_handler(stream)}
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(f"127.0.0.1:{port}", flush=True)
    await server.wait_for_termination()


def _parse() -> argparse.Namespace:
    parser = parser_for(__doc__ or "")
    parser.add_argument("--messages", type=int, default=300, help="in a stream")
    parser.add_argument("--period", type=float, default=13.0, help="milliseconds of a step")
    parser.add_argument("--serve", choices=("bare", "agentkv"), help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
