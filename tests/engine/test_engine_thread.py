"""The engine's thread: what it owes those who wait when it stops, and when it breaks."""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from fakes import make_engine

from agentkv.engine.async_engine import AsyncEngine
from agentkv.errors import AgentKVError, Reason, Unavailable
from agentkv.sampling_params import SamplingParams

TENANT = "tenant"


def run(scenario: Coroutine[Any, Any, None]) -> None:
    """Runs a scenario on a loop of its own; one that hangs fails."""

    async def bounded() -> None:
        async with asyncio.timeout(30):
            await scenario

    asyncio.run(bounded())


async def generated(engine: AsyncEngine, context_id: str) -> int:
    """Generates without end; returns how many tokens came before the failure that must come."""
    num_tokens = 0
    async with engine.generate(TENANT, context_id, SamplingParams(max_tokens=4000)) as stream:
        async for updates in stream:
            num_tokens += len(updates)
    return num_tokens


CALLS: dict[str, Callable[[AsyncEngine, str], Any]] = {
    "create": lambda engine, root: engine.create(TENANT, [1, 2]),
    "fork": lambda engine, root: engine.fork(TENANT, root),
    "extend": lambda engine, root: engine.extend(TENANT, root, [3]),
    "generate": generated,
    "score": lambda engine, root: engine.score(TENANT, root, [[4]]),
    "view": lambda engine, root: engine.view(),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_that_meets_the_stop_is_answered(name: str) -> None:
    """Catches a caller left waiting for ever by a command that the stopping thread never took."""

    async def scenario() -> None:
        engine = AsyncEngine(make_engine())
        await engine.start()
        root = (await engine.create(TENANT, range(5))).context.id
        call = asyncio.ensure_future(CALLS[name](engine, root))
        await asyncio.sleep(0)  # posted, and perhaps not taken yet
        await engine.stop()
        result: object
        (result,) = await asyncio.gather(call, return_exceptions=True)
        if isinstance(result, BaseException):
            assert isinstance(result, Unavailable)
            assert result.reason is Reason.SHUTTING_DOWN

    run(scenario())


@pytest.mark.parametrize("name", CALLS)
def test_a_broken_engine_answers_all_who_wait_and_who_come_later(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Catches a thread that dies of a fault of ours and leaves every client to its deadline."""

    async def scenario() -> None:
        core = make_engine()
        engine = AsyncEngine(core)
        await engine.start()
        root = (await engine.create(TENANT, range(5))).context.id

        def breaks() -> None:
            raise AssertionError("the secret")

        core.step = breaks  # type: ignore[method-assign,assignment]  # a fault that no input causes
        call = asyncio.ensure_future(CALLS[name](engine, root))
        breaking = asyncio.ensure_future(CALLS["extend"](engine, root))
        assert not await engine.wait_ended()
        for result in await asyncio.gather(call, breaking, return_exceptions=True):
            if isinstance(result, BaseException):
                assert isinstance(result, AgentKVError)
                assert result.reason in (Reason.ENGINE_STALLED, Reason.CONTEXT_BUSY)
                assert "secret" not in result.message
        with pytest.raises(Unavailable) as caught:
            await CALLS[name](engine, root)
        assert caught.value.reason is Reason.ENGINE_STALLED
        await engine.stop()

    run(scenario())
    (record,) = (record for record in caplog.records if record.levelno >= logging.ERROR)
    assert record.exc_info is not None


def test_the_end_of_a_stopped_engine_is_no_failure() -> None:
    """Catches a server that reports an orderly stop as a crash."""

    async def scenario() -> None:
        engine = AsyncEngine(make_engine())
        await engine.start()
        waiting = asyncio.ensure_future(engine.wait_ended())
        await engine.stop()
        assert await waiting

    run(scenario())
