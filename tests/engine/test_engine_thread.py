"""The engine's thread: what it owes those who wait when it stops, and when it breaks."""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from itertools import chain
from typing import Any

import pytest
from fakes import make_engine

from agentkv.engine.async_engine import AsyncEngine
from agentkv.engine.operations import Operation
from agentkv.engine.outputs import Chunk, Update
from agentkv.engine.stream_pace import LONGEST, least_interval
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


@pytest.mark.parametrize(("interval", "num_messages"), [(0.0, 50), (1000.0, 2)])
def test_tokens_of_many_steps_share_a_message_while_a_stream_is_paced(
    interval: float, num_messages: int
) -> None:
    """Catches tokens that are lost or reordered when held back, and a first or last one that is."""

    async def scenario() -> None:
        engine = AsyncEngine(make_engine(), stream_interval=interval)
        await engine.start()
        root = (await engine.create(TENANT, range(5))).context.id
        messages: list[tuple[Update, ...]] = []
        async with engine.generate(TENANT, root, SamplingParams(max_tokens=50)) as stream:
            async for updates in stream:
                messages.append(updates)
        chunks = [item for item in chain(*messages) if isinstance(item, Chunk)]
        told = [token for chunk in chunks for token in chunk.token_ids]
        assert told == list((await engine.tokens(TENANT, root, 5)).token_ids)
        assert len(messages) == num_messages
        assert isinstance(messages[0][0], Chunk), "the first token waits for nothing"
        await engine.stop()

    run(scenario())


def test_a_held_message_goes_out_once_it_is_due() -> None:
    """Catches tokens that wait for more: of a request that gave way none may come for long."""

    async def scenario() -> None:
        core = make_engine()
        engine = AsyncEngine(core, stream_interval=0.05)
        await engine.start()
        root = (await engine.create(TENANT, range(5))).context.id
        step, num_steps = core.step, 0

        def stalls(meanwhile: Callable[[], None] = lambda: None) -> Sequence[Operation]:
            nonlocal num_steps
            num_steps += 1
            if num_steps <= 3:
                return step(meanwhile)
            meanwhile()
            return ()

        core.step = stalls  # type: ignore[method-assign]  # a pool that stays full for ever
        async with engine.generate(TENANT, root, SamplingParams(max_tokens=50)) as stream:
            told: list[Update] = []
            while len(told) < 2:
                told += await anext(stream)
        assert [len(item.token_ids) for item in told if isinstance(item, Chunk)] == [1, 2]
        await engine.stop()

    run(scenario())


def test_few_streams_are_never_held_back() -> None:
    """Catches a default that makes one reader wait, and one that no number of streams changes."""
    assert least_interval(1) == least_interval(8) == 0
    assert 0 < least_interval(9) < least_interval(40) < least_interval(10_000) == LONGEST
