"""A real server in front of a real engine on a tiny random model, with a client beside it.

The model's tokens are bytes of text, so that every generated token has a text. The engine runs in
its own thread, and its events come when they come: a scenario waits for what it needs, by
`settled` or by reading a stream, and never for a time.
"""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import grpc.aio
from tiny_engines import load_tiny

from agentkv.config import EngineConfig, SchedulerConfig, ServerConfig
from agentkv.core.batch import Batch, StepResult
from agentkv.engine.async_engine import AsyncEngine
from agentkv.engine.build import build_engine_for
from agentkv.engine.engine import Engine
from agentkv.engine.outputs import EngineView
from agentkv.engine.runner import Runner
from agentkv.server.main import Server
from agentkv.v1 import agentkv_pb2_grpc as pb_grpc

MAX_LENGTH = 4096
WAIT = 30.0
"""Seconds after which what should have come never will."""


def tiny_engine(*, eos_token_ids: tuple[int, ...] = (), **settings: Any) -> Engine:
    """Builds an engine; `settings` are those of EngineConfig. By default no token ends a text."""
    loaded = replace(
        load_tiny(max_position_embeddings=MAX_LENGTH),
        max_length=MAX_LENGTH,
        eos_token_ids=eos_token_ids,
    )
    return build_engine_for(loaded, EngineConfig(**{"num_blocks": 512, **settings}))


class HeldRunner:
    """Runs steps of another runner, and holds each while the gate is closed."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self.gate = threading.Event()
        self.entered = threading.Event()
        self.failure: Exception | None = None

    def run(self, batch: Batch, meanwhile: Callable[[], None]) -> StepResult:
        meanwhile()
        self.entered.set()
        assert self.gate.wait(timeout=WAIT)
        if self.failure is not None:
            raise self.failure
        return self._runner.run(batch, lambda: None)

    async def is_entered(self) -> None:
        """Waits until a step has begun since `entered` was cleared."""
        assert await asyncio.to_thread(self.entered.wait, WAIT)


def held_engine(**settings: Any) -> tuple[Engine, HeldRunner]:
    """Builds an engine that computes 8 tokens of a request per step, with its gate open."""
    engine = tiny_engine(scheduler=SchedulerConfig(chunk_size=8, **settings))
    runner = HeldRunner(engine._loop._runner)
    engine._loop._runner = runner
    runner.gate.set()
    return engine, runner


class ReallyServed(NamedTuple):
    """What a scenario works with."""

    stub: Any
    """The service's stub of the asyncio stack."""
    engine: AsyncEngine
    core: Engine
    """The engine behind; to be looked at only while it has no work, or after the server ended."""
    server: Server
    channel: grpc.aio.Channel

    async def settled(self, holds: Callable[[EngineView], bool]) -> EngineView:
        """Waits until a view of the engine is as wanted, and returns it.

        Each look takes a turn of the engine's thread, so this waits no longer than it must.
        """
        while not holds(view := await self.engine.view()):
            pass
        return view


@asynccontextmanager
async def really_serving(
    engine: Engine | None = None, **settings: Any
) -> AsyncIterator[ReallyServed]:
    """Serves an engine while the block runs; `settings` are those of ServerConfig.

    At the end every invariant of the engine's bookkeeping is checked.
    """
    core = engine or tiny_engine()
    served = AsyncEngine(core)
    config = ServerConfig(**{"port": 0, "grace": 0.0, **settings})
    async with (
        Server(served, config) as server,
        grpc.aio.insecure_channel(server.address) as channel,
    ):
        yield ReallyServed(pb_grpc.ContextServiceStub(channel), served, core, server, channel)
    core.check()
