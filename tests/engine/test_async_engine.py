"""The engine behind asyncio: who may leave, who still waits, and what a slow reader gets.

The engine's thread runs for real. A scenario holds it inside a step with a `Gate`, so that what
happens "during" a request happens exactly there.
"""

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any

import pytest
from fakes import FakeModelRunner, continuation, make_engine

from agentkv.config import SchedulerConfig
from agentkv.core.batch import Batch
from agentkv.engine.async_engine import AsyncEngine
from agentkv.engine.engine_stream import EngineStream
from agentkv.engine.outputs import Chunk, EngineView, Finish, Update
from agentkv.errors import AgentKVError, ContextBusy, InvalidRequest, NotFound, Reason, Unavailable
from agentkv.sampling_params import SamplingParams

TENANT = "tenant"
PROMPT = [3, 1, 4, 1, 5]
LONG = SamplingParams(max_tokens=200)


class Gate:
    """Holds the engine's thread at the start of its next step, until it is opened."""

    def __init__(self, runner: FakeModelRunner) -> None:
        self._reached = threading.Semaphore(0)
        self._opened = threading.Semaphore(0)
        self._is_shut = False
        runner.before_step = self._pass

    async def shut(self) -> None:
        """From now on every step waits for `let_through`."""
        self._is_shut = True

    async def reached(self) -> None:
        """Waits until a step is being held."""
        await asyncio.to_thread(self._reached.acquire)

    def let_through(self) -> None:
        """Lets the step that is held run, and holds the next one."""
        self._opened.release()

    def open(self) -> None:
        """Holds no step any more."""
        self._is_shut = False
        self._opened.release()

    def _pass(self, batch: Batch) -> None:
        if self._is_shut:
            self._reached.release()
            self._opened.acquire()


class Bridge:
    """An engine on a fake model behind its own thread."""

    def __init__(self) -> None:
        self.runner = FakeModelRunner(num_blocks=256, block_size=16)
        # Chunks so small that what a scenario cancels takes several steps.
        self.core = make_engine(self.runner, scheduler=SchedulerConfig(chunk_size=4))
        self.engine = AsyncEngine(self.core)
        self.gate = Gate(self.runner)

    async def __aenter__(self) -> "Bridge":
        await self.engine.start()
        return self

    async def __aexit__(self, *exception: object) -> None:
        self.gate.open()
        await self.engine.stop()
        self.core.check()

    async def create(self) -> str:
        return (await self.engine.create(TENANT, PROMPT)).context.id

    async def idle(self) -> EngineView:
        """Waits until no request is left; each look takes a turn of the engine's thread."""
        while True:
            view = await self.engine.view()
            if not (view.num_running or view.num_waiting):
                return view


def run(scenario: Coroutine[Any, Any, None]) -> None:
    """Runs a scenario on a loop of its own; one that hangs fails."""

    async def bounded() -> None:
        async with asyncio.timeout(30):
            await scenario

    asyncio.run(bounded())


def engine_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "agentkv-engine"]


def tokens_of(updates: list[Update]) -> list[int]:
    return [token for item in updates if isinstance(item, Chunk) for token in item.token_ids]


async def read(stream: EngineStream[Update], into: list[Update]) -> None:
    async for updates in stream:
        into += updates


async def cancelled(task: "asyncio.Task[Any]") -> None:
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.parametrize("verb", ["create", "extend", "score"])
def test_who_leaves_takes_the_work_along(verb: str) -> None:
    """Catches work, blocks and a busy context that stay when the caller is cancelled."""

    async def scenario() -> None:
        async with Bridge() as bridge:
            engine = bridge.engine
            root = await bridge.create()
            before = await bridge.idle()
            await bridge.gate.shut()
            calls: dict[str, Any] = {
                "create": lambda: engine.create(TENANT, range(100)),
                "extend": lambda: engine.extend(TENANT, root, range(100)),
                "score": lambda: engine.score(TENANT, root, [range(50), range(50, 100)]),
            }
            task = asyncio.ensure_future(calls[verb]())
            await bridge.gate.reached()
            await cancelled(task)
            bridge.gate.open()
            after = await bridge.idle()
            assert (after.num_contexts, after.pool.live) == (1, before.pool.live)
            context = await engine.get(TENANT, root)
            assert (context.length, context.is_busy) == (len(PROMPT), False)
            assert (await engine.extend(TENANT, root, [9])).context.length == len(PROMPT) + 1

    run(scenario())


def test_who_left_before_the_command_ran_begins_nothing() -> None:
    """Catches a create that runs, and keeps its context, for a caller who is gone already."""

    async def scenario() -> None:
        async with Bridge() as bridge:
            root = await bridge.create()
            await bridge.gate.shut()
            blocking = asyncio.ensure_future(bridge.engine.extend(TENANT, root, [1]))
            await bridge.gate.reached()  # commands are taken between steps: none is now
            task = asyncio.ensure_future(bridge.engine.create(TENANT, [7, 8]))
            await asyncio.sleep(0)
            await cancelled(task)
            bridge.gate.open()
            await blocking
            assert (await bridge.idle()).num_contexts == 1

    run(scenario())


def test_one_of_several_waiters_may_leave() -> None:
    """Catches a repeat that loses its answer because the first caller went away, or reverse."""

    async def scenario() -> None:
        async with Bridge() as bridge:
            await bridge.gate.shut()
            tasks = [
                asyncio.ensure_future(bridge.engine.create(TENANT, PROMPT, request_id="once"))
                for _ in range(3)
            ]
            await bridge.gate.reached()
            await cancelled(tasks[0])
            bridge.gate.open()
            answers = await asyncio.gather(*tasks[1:])
            assert answers[0] == answers[1]
            repeated = await bridge.engine.create(TENANT, PROMPT, request_id="once")
            assert repeated == answers[0]
            assert (await bridge.idle()).num_contexts == 1

    run(scenario())


def test_a_repeat_of_a_cancelled_create_runs_again() -> None:
    """Catches the handle of a context that was given up, answered to who tries again."""

    async def scenario() -> None:
        async with Bridge() as bridge:
            await bridge.gate.shut()
            task = asyncio.ensure_future(bridge.engine.create(TENANT, PROMPT, request_id="once"))
            await bridge.gate.reached()
            await cancelled(task)
            bridge.gate.open()
            await bridge.idle()
            again = await bridge.engine.create(TENANT, PROMPT, request_id="once")
            found = await bridge.engine.get(TENANT, again.context.id)
            assert found.length == len(PROMPT)

    run(scenario())


def test_a_repeat_of_a_failed_create_runs_again(caplog: pytest.LogCaptureFixture) -> None:
    """Catches a failure that a caller who tries again is told for ten minutes."""

    async def scenario() -> None:
        async with Bridge() as bridge:
            usual = bridge.runner.before_step

            def fails(batch: Batch) -> None:
                bridge.runner.before_step = usual
                raise RuntimeError("a device that fails once")

            bridge.runner.before_step = fails
            with pytest.raises(AgentKVError) as caught:
                await bridge.engine.create(TENANT, PROMPT, request_id="once")
            assert caught.value.reason is Reason.ENGINE_STEP_FAILED
            again = await bridge.engine.create(TENANT, PROMPT, request_id="once")
            assert again.context.length == len(PROMPT)

    run(scenario())


def test_a_slow_reader_loses_nothing_and_costs_no_message_per_step() -> None:
    """Catches tokens lost or doubled where the engine holds back, and a buffer without bound."""

    async def scenario() -> None:
        async with Bridge() as bridge:
            root = await bridge.create()
            messages: list[tuple[Update, ...]] = []
            async with bridge.engine.generate(TENANT, root, LONG) as stream:
                await bridge.idle()  # the whole generation, while nothing is read
                async for updates in stream:
                    messages.append(updates)
            updates_seen = [update for message in messages for update in message]
            assert tokens_of(updates_seen) == continuation(PROMPT, 200)
            assert len(messages) == 65  # as many as may be unread, and one with all the rest
            assert isinstance(updates_seen[-1], Finish)
            assert [len(tokens_of(list(message))) for message in messages[-2:]] == [1, 136]

    run(scenario())


def test_a_reader_that_keeps_up_gets_a_message_per_step() -> None:
    """Catches a stream held back although it is read, or one that never goes on."""

    async def scenario() -> None:
        async with Bridge() as bridge:
            root = await bridge.create()
            await bridge.gate.shut()
            seen: list[Update] = []
            async with bridge.engine.generate(TENANT, root, LONG) as stream:
                for number in range(150):
                    await bridge.gate.reached()
                    bridge.gate.let_through()
                    seen += await anext(stream)
                    assert len(tokens_of(seen)) == number + 1
                bridge.gate.open()
                await read(stream, seen)
            assert tokens_of(seen) == continuation(PROMPT, 200)

    run(scenario())


def test_leaving_a_stream_ends_its_generation() -> None:
    """Catches a generation that outlives its reader, or a context left busy or behind."""

    async def scenario() -> None:
        async with Bridge() as bridge:
            root = await bridge.create()
            async with bridge.engine.generate(TENANT, root, SamplingParams(max_tokens=4000)) as s:
                seen = list(await anext(s))
                with pytest.raises(ContextBusy):
                    await bridge.engine.extend(TENANT, root, [1])
            await bridge.idle()
            await read(s, seen)
            context = await bridge.engine.get(TENANT, root)
            assert len(PROMPT) + len(tokens_of(seen)) <= context.length < 4000
            s.close()  # twice is fine

    run(scenario())


def test_a_released_context_ends_its_stream() -> None:
    """Catches a stream that waits for ever for a context that is gone."""

    async def scenario() -> None:
        async with Bridge() as bridge:
            root = await bridge.create()
            params = SamplingParams(max_tokens=4000)
            async with bridge.engine.generate(TENANT, root, params) as stream:
                seen = list(await anext(stream))
                released = await bridge.engine.release(TENANT, [root])
                with pytest.raises(NotFound) as caught:
                    await read(stream, seen)
            assert caught.value.reason is Reason.CONTEXT_RELEASED
            assert released.num_released == 1
            assert tokens_of(seen) == continuation(PROMPT, len(tokens_of(seen)))
            with pytest.raises(NotFound):
                await bridge.engine.get(TENANT, root)

    run(scenario())


def test_a_refused_generation_raises_from_its_iteration() -> None:
    """Catches a refusal that is lost on the engine's thread."""

    async def scenario() -> None:
        async with Bridge() as bridge:
            root = await bridge.create()
            await bridge.engine.truncate(TENANT, root, 0)
            async with bridge.engine.generate(TENANT, root, LONG) as stream:
                with pytest.raises(InvalidRequest):
                    await anext(stream)

    run(scenario())


def test_stopping_ends_streams_after_what_they_had() -> None:
    """Catches a stream cut short of its tokens or left open, a thread left behind."""

    async def scenario() -> None:
        async with Bridge() as bridge:
            root = await bridge.create()
            seen: list[Update] = []
            async with bridge.engine.generate(
                TENANT, root, SamplingParams(max_tokens=4000)
            ) as stream:
                seen += await anext(stream)
                await bridge.engine.stop()
                assert not engine_threads()
                with pytest.raises(Unavailable) as caught:
                    await read(stream, seen)
            assert caught.value.reason is Reason.SHUTTING_DOWN
            length = bridge.core.observer.get(TENANT, root).length
            assert tokens_of(seen) == continuation(PROMPT, length - len(PROMPT))
            await bridge.engine.stop()  # twice is fine

    run(scenario())


def test_calls_after_the_stop_are_refused() -> None:
    """Catches a call that waits for a thread that is gone."""

    async def scenario() -> None:
        async with Bridge() as bridge:
            root = await bridge.create()
            await bridge.engine.stop()
            calls = (
                bridge.engine.create(TENANT, PROMPT),
                bridge.engine.fork(TENANT, root),
                bridge.engine.get(TENANT, root),
                anext(bridge.engine.generate(TENANT, root, LONG)),
            )
            for call in calls:
                with pytest.raises(Unavailable) as caught:
                    await call
                assert caught.value.reason is Reason.SHUTTING_DOWN

    run(scenario())


def test_an_engine_that_never_started_stops() -> None:
    """Catches a stop that joins a thread which does not run."""

    async def scenario() -> None:
        await AsyncEngine(make_engine()).stop()

    run(scenario())
