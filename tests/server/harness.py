"""A real server on a loopback port in front of the fake engine, with a client beside it."""

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import grpc.aio
import pytest
from server.fake_engine import FakeEngine

from agentkv import status
from agentkv.config import ServerConfig
from agentkv.errors import AgentKVError
from agentkv.server.main import Server
from agentkv.v1 import agentkv_pb2_grpc as pb_grpc


class Served(NamedTuple):
    """What a scenario works with."""

    stub: Any
    """The service's stub of the asyncio stack."""
    engine: FakeEngine
    server: Server
    channel: grpc.aio.Channel


@asynccontextmanager
async def serving(engine: FakeEngine | None = None, **settings: Any) -> AsyncIterator[Served]:
    """Serves the fake engine while the block runs; `settings` are those of ServerConfig."""
    engine = engine or FakeEngine()
    config = ServerConfig(**{"port": 0, "grace": 0.0, **settings})
    async with (
        Server(engine, config) as server,
        grpc.aio.insecure_channel(server.address) as channel,
    ):
        yield Served(pb_grpc.ContextServiceStub(channel), engine, server, channel)


def run(scenario: Coroutine[Any, Any, None]) -> None:
    """Runs a scenario on a loop of its own; one that hangs fails."""

    async def bounded() -> None:
        async with asyncio.timeout(30):
            await scenario

    asyncio.run(bounded())


async def received_of(call: Any, into: list[Any]) -> None:
    """Reads a stream on to its end, or waits for the answer of a unary call."""
    if isinstance(call, grpc.aio.UnaryStreamCall):
        while (message := await call.read()) is not grpc.aio.EOF:
            into.append(message)
    else:
        into.append(await call)


async def failure_of(call: Any, into: list[Any] | None = None) -> AgentKVError:
    """Waits for a call that must fail, unary or stream, and returns what a client would see.

    Args:
        call: The call.
        into: Takes what was received before the failure.
    """
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await received_of(call, [] if into is None else into)
    return status.from_rpc_error(caught.value)
