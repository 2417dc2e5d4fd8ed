"""Calls that end before their time, against a real engine: nothing runs on, nothing is lost."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import grpc.aio
import pytest
from server.harness import failure_of, run
from server.real_engine import HeldRunner, ReallyServed, held_engine, really_serving, tiny_engine

from agentkv import errors
from agentkv.engine.outputs import EngineView
from agentkv.errors import Reason
from agentkv.v1 import agentkv_pb2 as pb
from agentkv.v1 import agentkv_pb2_grpc as pb_grpc

PROMPT = pb.TokenIds(ids=range(10, 50))
LONG = pb.TokenIds(ids=[7] * 200)
MANY = pb.SamplingOptions(max_tokens=3000)
METHODS = ["Create", "Extend", "Generate", "GenerateBranches", "Score"]


def request_of(method: str, root: str) -> Any:
    """Makes a request that takes many steps; only Create does not name the context."""
    score = [pb.Continuation(token_ids=LONG)] * 3
    return {
        "Create": pb.CreateRequest(token_ids=LONG),
        "Extend": pb.ExtendRequest(context_id=root, token_ids=LONG),
        "Generate": pb.GenerateRequest(context_id=root, sampling=MANY),
        "GenerateBranches": pb.GenerateBranchesRequest(context_id=root, count=5, sampling=MANY),
        "Score": pb.ScoreRequest(context_id=root, continuations=score),
    }[method]


async def created(served: ReallyServed) -> str:
    answer = await served.stub.Create(pb.CreateRequest(token_ids=PROMPT))
    return str(answer.context.id)


class Cut(NamedTuple):
    """A call that is to be cut short while a step runs, and what was there before."""

    served: ReallyServed
    runner: HeldRunner
    root: str
    before: EngineView

    async def ended(self) -> EngineView:
        """Lets the step that runs end after the handlers have; waits for the engine to be idle."""
        await self.served.server._open_calls.wait_none()
        self.runner.gate.set()
        return await self.served.settled(lambda view: view.num_running + view.num_waiting == 0)


@asynccontextmanager
async def about_to_cut() -> AsyncIterator[Cut]:
    """Serves an engine whose gate is closed; at the end nothing of any call may be left."""
    engine, runner = held_engine()
    async with really_serving(engine) as served:
        root = await created(served)
        before = await served.engine.view()
        runner.entered.clear()
        runner.gate.clear()
        yield Cut(served, runner, root, before)
        context = await served.engine.get("default", root)
        assert not context.is_busy
        released = await served.engine.release("default", [root], recursive=True)
        assert released.pool.live == 0
    engine.flush_cache()
    assert engine.observer.pool().free == engine.observer.pool().total


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("how", ["cancel", "close"])
def test_a_call_that_its_client_left_leaves_no_work_behind(method: str, how: str) -> None:
    """Catches a request that runs on, and holds blocks, for a client that has left."""

    async def scenario() -> None:
        async with about_to_cut() as cut:
            call = getattr(cut.served.stub, method)(request_of(method, cut.root))
            await cut.runner.is_entered()
            if how == "cancel":
                call.cancel()
            else:
                await cut.served.channel.close()
            after = await cut.ended()
            num_branches = 5 if method == "GenerateBranches" else 0
            assert after.num_contexts == cut.before.num_contexts + num_branches
            length = (await cut.served.engine.get("default", cut.root)).length
            # The step under way committed a token at most, and given tokens are never cut.
            assert length - 40 in ((0, 1) if method == "Generate" else (0,))

    run(scenario())


@pytest.mark.parametrize("method", METHODS)
def test_a_deadline_of_a_millisecond_leaves_no_work_behind(method: str) -> None:
    """Catches work that begins, or goes on, for a caller that has given up."""

    async def scenario() -> None:
        async with about_to_cut() as cut:
            call = getattr(cut.served.stub, method)(request_of(method, cut.root), timeout=0.001)
            assert isinstance(await failure_of(call), errors.DeadlineExceeded)
            after = await cut.ended()
            assert after.computed_tokens - cut.before.computed_tokens <= 3 * 8  # one step
            assert (await cut.served.engine.get("default", cut.root)).length in (40, 41)

    run(scenario())


def test_fifty_cancelled_streams_make_room_for_fifty_others() -> None:
    """Catches a handler, a task or a request that each abandoned stream leaves behind."""

    async def scenario() -> None:
        async with really_serving() as served:
            root = await created(served)
            branches = (await served.stub.Fork(pb.ForkRequest(context_id=root, count=50))).contexts
            num_tasks = len(asyncio.all_tasks())

            async def begin(handle: str, num_tokens: int) -> Any:
                sampling = pb.SamplingOptions(max_tokens=num_tokens)
                call = served.stub.Generate(
                    pb.GenerateRequest(context_id=handle, sampling=sampling)
                )
                await call.read()
                return call

            calls = await asyncio.gather(*(begin(branch.id, 3000) for branch in branches))
            for call in calls:
                call.cancel()
            await served.server._open_calls.wait_none()
            await served.settled(lambda view: view.num_running + view.num_waiting == 0)
            calls = await asyncio.gather(*(begin(branch.id, 2) for branch in branches))
            for call in calls:
                assert (await call.read()).HasField("finish")
                assert await call.read() is grpc.aio.EOF
            await served.server._open_calls.wait_none()
            del call, calls
            assert len(asyncio.all_tasks()) <= num_tasks

    run(scenario())


def test_case_39_the_next_turn_comes_while_the_last_is_being_ended() -> None:
    """Catches a turn that runs on a context cut back by the end of the turn before it."""

    async def scenario() -> None:
        async with about_to_cut() as cut:
            stub = cut.served.stub
            call = stub.Generate(request_of("Generate", cut.root))
            await cut.runner.is_entered()
            call.cancel()
            turn = pb.ExtendRequest(
                context_id=cut.root, token_ids=pb.TokenIds(ids=[1, 2, 3, 4]), expected_length=40
            )
            early = asyncio.ensure_future(failure_of(stub.Extend(turn)))
            cut.runner.gate.set()
            assert isinstance(await early, errors.ContextBusy | errors.ContextMoved)
            await cut.ended()
            moved = await failure_of(stub.Extend(turn))
            assert isinstance(moved, errors.ContextMoved)
            turn.expected_length = moved.actual_length
            assert (await stub.Extend(turn)).context.length == moved.actual_length + 4

    run(scenario())


def test_release_wins_over_a_running_stream() -> None:
    """Catches a stream that goes on, or hangs, on a context that is gone."""

    async def scenario() -> None:
        async with really_serving() as served:
            root, other = await created(served), await created(served)
            call = served.stub.Generate(request_of("Generate", root))
            await call.read()
            busy = await failure_of(served.stub.Generate(request_of("Generate", root)))
            assert isinstance(busy, errors.ContextBusy)
            await served.stub.Release(pb.ReleaseRequest(context_ids=[root]))
            error = await failure_of(call)
            assert isinstance(error, errors.NotFound)
            assert error.reason is Reason.CONTEXT_RELEASED
            assert (await served.engine.get("default", other)).length == 40

    run(scenario())


def test_a_failed_step_fails_its_own_calls_only() -> None:
    """Catches a kernel's error that ends the engine, loses tokens, or shows its text."""

    async def scenario() -> None:
        async with about_to_cut() as cut:
            stub = cut.served.stub
            generate = stub.Generate(request_of("Generate", cut.root))
            await cut.runner.is_entered()
            cut.runner.failure = RuntimeError("the secret")
            cut.runner.gate.set()
            error = await failure_of(generate)
            assert isinstance(error, errors.InternalError)
            assert error.reason is Reason.ENGINE_STEP_FAILED
            assert "secret" not in error.message
            cut.runner.failure = None
            sampling = pb.SamplingOptions(max_tokens=3)
            again = stub.Generate(
                pb.GenerateRequest(context_id=cut.root, sampling=sampling, expected_length=40)
            )
            assert sum([len(message.chunk.token_ids) async for message in again]) == 3

    run(scenario())


def test_case_114_a_stalled_reader_loses_its_stream_and_no_token() -> None:
    """Catches a reader that holds a handler, a request or its blocks by not reading."""
    # More than a stream's window at once, so that the very first write waits for the reader.
    labels = {f"label {number}": "v" * 256 for number in range(64)}

    async def scenario() -> None:
        async with (
            really_serving(stall_timeout=0.2) as served,
            # Without the probe a client takes megabytes that nobody has read.
            grpc.aio.insecure_channel(
                served.server.address, options=[("grpc.http2.bdp_probe", 0)]
            ) as channel,
        ):
            root = await created(served)
            stub: Any = pb_grpc.ContextServiceStub(channel)
            call = stub.GenerateBranches(
                pb.GenerateBranchesRequest(context_id=root, count=32, sampling=MANY, labels=labels)
            )
            await served.settled(lambda view: view.num_running == 32)
            sampling = pb.SamplingOptions(max_tokens=20)
            other = served.stub.Generate(pb.GenerateRequest(context_id=root, sampling=sampling))
            assert sum([len(message.chunk.token_ids) async for message in other]) == 20
            await served.server._open_calls.wait_none()
            await served.settled(lambda view: view.num_running == 0)
            received: list[pb.GenerateBranchesResponse] = []
            error = await failure_of(call, received)
            assert isinstance(error, errors.SlowReader)
            handles = [context.id for context in received[0].contexts]
            assert len(handles) == 32
            for branch, handle in enumerate(handles):
                heard = [
                    token
                    for message in received
                    for chunk in message.chunks
                    if chunk.branch == branch
                    for token in chunk.token_ids
                ]
                answer = await served.stub.Get(pb.GetRequest(context_id=handle, tokens_from=40))
                assert heard == list(answer.token_ids)[: len(heard)]
                assert answer.context.length == 40 + len(answer.token_ids)

    run(scenario())


def test_a_lost_answer_is_asked_for_again() -> None:
    """Catches a retry that appends twice, or that makes a second context or branch."""

    async def scenario() -> None:
        async with really_serving() as served:
            stub = served.stub
            create = pb.CreateRequest(token_ids=PROMPT, request_id="one")
            first, second = await asyncio.gather(stub.Create(create), stub.Create(create))
            assert first.context.id == second.context.id
            root = first.context.id
            fork = pb.ForkRequest(context_id=root, count=3, request_id="one")
            forks = [await stub.Fork(fork) for _ in range(2)]
            assert forks[0].contexts == forks[1].contexts
            assert (await served.engine.view()).num_contexts == 4
            create.token_ids.ids.append(3)
            error = await failure_of(stub.Create(create))
            assert error.reason is Reason.REQUEST_ID_REUSED
            extend = pb.ExtendRequest(context_id=root, token_ids=PROMPT, expected_length=40)
            assert (await stub.Extend(extend)).context.length == 80
            moved = await failure_of(stub.Extend(extend))
            assert isinstance(moved, errors.ContextMoved)
            assert moved.actual_length == 80
            truncate = pb.TruncateRequest(context_id=root, length=40)
            lengths = [(await stub.Truncate(truncate)).context.length for _ in range(2)]
            assert lengths == [40, 40]

    run(scenario())


def test_what_the_server_has_no_room_for_is_refused_with_numbers() -> None:
    """Catches a full pool or queue that answers with a hang, or without what would help."""

    async def scenario() -> None:
        engine, _ = held_engine(max_waiting=2)
        async with really_serving(engine) as served:
            root = await created(served)
            huge = pb.TokenIds(ids=[5] * 4000)
            long = await served.stub.Create(pb.CreateRequest(token_ids=huge))
            score = pb.ScoreRequest(
                context_id=root, continuations=[pb.Continuation(token_ids=huge)] * 3
            )
            error = await failure_of(served.stub.Score(score))
            assert isinstance(error, errors.PoolExhausted)
            assert error.reason is Reason.QUEUE_FULL
            assert error.retry_after is None, "three never fit"
            assert (await served.engine.view()).num_contexts == 2
            await served.stub.Release(pb.ReleaseRequest(context_ids=[long.context.id]))
        small = tiny_engine(num_blocks=16)
        async with really_serving(small) as served:
            root = await created(served)
            too_much = pb.ExtendRequest(context_id=root, token_ids=pb.TokenIds(ids=[5] * 300))
            error = await failure_of(served.stub.Extend(too_much))
            assert isinstance(error, errors.PoolExhausted)
            assert error.reason is Reason.KV_BLOCKS_EXHAUSTED
            assert {"need", "free", "reclaimable"} <= set(error.metadata)
            assert (await served.engine.get("default", root)).length == 40

    run(scenario())
