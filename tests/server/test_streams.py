"""Calls that end before their time: cancelled, late, unread, or failed by a fault of ours."""

import asyncio
import logging
from typing import Any

import grpc.aio
import pytest
from server.fake_engine import FakeEngine
from server.harness import Served, failure_of, run, serving

from agentkv import errors
from agentkv.errors import Reason
from agentkv.server.interceptors import DeadlineInterceptor
from agentkv.v1 import agentkv_pb2 as pb

LONG = pb.SamplingOptions(max_tokens=1000)


async def begun(
    served: Served,
) -> grpc.aio.UnaryStreamCall[pb.GenerateRequest, pb.GenerateResponse]:
    """Starts a generation and reads its first message; the engine then holds it at the gate."""
    served.engine.steps_before_hold = 2
    root = (await served.stub.Create(pb.CreateRequest(text="a"))).context.id
    call = served.stub.Generate(pb.GenerateRequest(context_id=root, sampling=LONG))
    assert (await call.read()).chunk.token_ids
    await served.engine.waiting.wait()
    served.engine.all_closed.clear()
    assert served.engine.open_streams
    return call  # type: ignore[no-any-return]  # the stub of the harness is Any


def test_cancelling_closes_the_generation() -> None:
    """Catches a generation that goes on, and holds its blocks, after its client has left."""

    async def scenario() -> None:
        async with serving() as served:
            call = await begun(served)
            call.cancel()
            await served.engine.all_closed.wait()

    run(scenario())


def test_closing_the_channel_closes_the_generation() -> None:
    """Catches a generation that survives a client's crash."""

    async def scenario() -> None:
        async with serving() as served:
            call = await begun(served)
            await served.channel.close()
            await served.engine.all_closed.wait()
            assert call.cancelled()

    run(scenario())


@pytest.mark.parametrize("method", ["Generate", "GenerateBranches"])
def test_a_refused_generation_is_closed_too(method: str) -> None:
    """Catches a stream leaked when the engine refuses the call at its first step."""

    async def scenario() -> None:
        async with serving() as served:
            request = {
                "Generate": pb.GenerateRequest(context_id="unknown"),
                "GenerateBranches": pb.GenerateBranchesRequest(context_id="unknown"),
            }[method]
            error = await failure_of(getattr(served.stub, method)(request))
            assert error.reason is Reason.CONTEXT_NOT_FOUND
            assert not served.engine.open_streams

    run(scenario())


@pytest.mark.parametrize("asked", [None, 3.2e8], ids=["none", "ten years"])
def test_the_server_bounds_a_call_that_does_not(asked: float | None) -> None:
    """Catches a call without a deadline, or with one of ten years, that holds blocks as long."""

    async def scenario() -> None:
        async with serving(default_deadline=0.1, max_deadline=0.1) as served:
            served.engine.gate.clear()
            call = served.stub.Create(pb.CreateRequest(text="a"), timeout=asked)
            assert isinstance(await failure_of(call), errors.DeadlineExceeded)

    run(scenario())


def test_a_late_call_never_reaches_its_method() -> None:
    """Catches engine work for a call whose client has given up already."""

    class LateRpc:
        def time_remaining(self) -> float:
            return 0.0

    async def behaviour(request: Any, rpc: Any) -> None:
        raise AssertionError("called")

    async def scenario() -> None:
        interceptor = DeadlineInterceptor(default=1.0, longest=1.0)
        late: Any = LateRpc()
        with pytest.raises(errors.DeadlineExceeded):
            await interceptor.around(behaviour, None, late, "/agentkv.v1.ContextService/Create")

    run(scenario())


def test_a_stalled_reader_loses_the_stream_and_not_the_context() -> None:
    """Catches a reader that holds a generation, and its blocks, for ever by not reading."""

    async def scenario() -> None:
        engine = FakeEngine()
        engine.chunk_text = "x" * 200_000
        async with serving(engine, stall_timeout=0.2) as served:
            root = (await served.stub.Create(pb.CreateRequest(text="a"))).context.id
            call = served.stub.Generate(pb.GenerateRequest(context_id=root, sampling=LONG))
            await engine.all_closed.wait()
            length = len(engine.contexts[root].tokens)
            assert length < 1000
            received: list[pb.GenerateResponse] = []
            error = await failure_of(call, received)
            assert isinstance(error, errors.SlowReader)
            assert error.reason is Reason.SLOW_READER
            # All that was written arrives, in order; the step that was not is in the context.
            assert len(received) in (length - 3, length - 2)
            assert (await served.stub.Get(pb.GetRequest(context_id=root))).context.length == length

    run(scenario())


@pytest.mark.parametrize("method", ["create", "generate"])
def test_a_cancellation_of_our_own_does_not_hang_the_client(method: str) -> None:
    """Catches an inner future's CancelledError, on which gRPC would leave the client waiting."""

    async def scenario() -> None:
        async with serving() as served:
            served.engine.failures[method] = asyncio.CancelledError()
            call = {
                "create": lambda: served.stub.Create(pb.CreateRequest(text="a")),
                "generate": lambda: served.stub.Generate(pb.GenerateRequest(context_id="c0")),
            }[method]()
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await (call if method == "create" else call.read())
            assert caught.value.code() is grpc.StatusCode.CANCELLED

    run(scenario())


@pytest.mark.parametrize("method", ["create", "generate"])
def test_the_text_of_an_uncaught_exception_stays_here(
    method: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Catches a traceback, path or prompt that reaches a client; the log alone has it."""

    async def scenario() -> None:
        async with serving() as served:
            served.engine.failures[method] = ZeroDivisionError("the secret")
            call = {
                "create": lambda: served.stub.Create(pb.CreateRequest(text="a")),
                "generate": lambda: served.stub.Generate(pb.GenerateRequest(context_id="c0")),
            }[method]()
            error = await failure_of(call)
            assert isinstance(error, errors.InternalError)
            assert error.reason is Reason.INTERNAL_ERROR
            assert "secret" not in f"{error.message}{error.metadata}"
            (record,) = (r for r in caplog.records if r.levelno >= logging.ERROR)
            assert record.exc_info is not None
            assert record.args is not None
            assert str(tuple(record.args)[-1]) in error.message
            assert "the secret" in caplog.text

    run(scenario())


def test_retry_hints_and_numbers_reach_the_client() -> None:
    """Catches a full pool whose answer does not say how much is missing and when to return."""

    async def scenario() -> None:
        async with serving() as served:
            served.engine.failures["create"] = errors.PoolExhausted(
                "Full.", metadata={"need": 9, "free": 2, "reclaimable": 3}, retry_after=0.25
            )
            error = await failure_of(served.stub.Create(pb.CreateRequest(text="a")))
            assert isinstance(error, errors.PoolExhausted)
            assert error.retry_after == 0.25
            assert error.metadata == {"need": "9", "free": "2", "reclaimable": "3"}

    run(scenario())
