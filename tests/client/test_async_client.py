"""The asyncio client: the same rules on the other stack, and what only that stack has."""

import asyncio
import copy
from collections.abc import Awaitable, Callable

import pytest
from client.conftest import HASTY
from client.fake_service import FakeService, Fault, Hang

from agentkv import (
    AsyncClient,
    AsyncContextHandle,
    BranchFinish,
    Cancelled,
    DeadlineExceeded,
    InvalidRequest,
    NotFound,
    Released,
    Unavailable,
    Usage,
)


def run(address: str, scenario: Callable[[AsyncClient], Awaitable[None]]) -> None:
    """Runs a scenario with a client that retries at once."""

    async def main() -> None:
        async with AsyncClient(address, timeout=10, retry=HASTY) as client:
            await scenario(client)

    asyncio.run(main())


def test_every_verb(address: str, service: FakeService) -> None:
    """Catches a twin that forgot a verb, an argument or an await."""

    async def scenario(client: AsyncClient) -> None:
        async with await client.create("abcd", labels={"plan": "a"}) as root:
            assert (await root.extend("ef", logprobs=True)).logprobs == (-0.5, -0.5)
            assert (await root.complete(max_tokens=2)).text == "gh"
            first, second = await root.fork(2, at=3)
            assert (await root.fork_one()).length == 8
            assert [score.mean for score in await first.score(["x", [1]])] == [-0.5, -0.5]
            assert (await second.truncate(1)).length == second.length == 1
            assert bytes(await root.read_tokens(6)) == b"gh"
            assert (await root.refresh()).labels == {"plan": "a"}
            branches = await root.complete_branches(2, max_tokens=1)
            assert [branch.text for branch in branches] == ["i", "i"]
            assert (await client.attach(root.id)).length == 8
            assert len([info async for info in client.list(root.id)]) == 6
            assert (await client.server_info()).model.name == "alphabet"
            assert (await client.get_usage()).bill == (await root.get_usage()).bill
            assert await first.release() == Released(num_released=1)
            assert copy.deepcopy(root) is root
        assert service.contexts == {}
        assert client.usage == Usage(computed_tokens=10, cached_tokens=1, generated_tokens=4)
        assert client.pool is not None

    run(address, scenario)


def test_streams_are_iterated_and_collected(address: str) -> None:
    """Catches an asyncio stream that ends early, or cannot be collected after being read."""

    async def scenario(client: AsyncClient) -> None:
        root = await client.create("abc")
        async with root.generate(max_tokens=3) as stream:
            assert [chunk.text async for chunk in stream] == ["d", "e", "f"]
            assert (await stream.result()).text == stream.text_so_far == "def"
            assert stream.token_ids_so_far == (100, 101, 102)
        async with root.generate_branches(2, max_tokens=1) as events:
            finished = [event.branch async for event in events if isinstance(event, BranchFinish)]
            assert finished == [0, 1]
            assert [len(events.contexts), len(await events.result())] == [2, 2]

    run(address, scenario)


def test_streams_run_side_by_side(address: str) -> None:
    """Catches results bound to the wrong stream when tasks interleave."""

    async def scenario(client: AsyncClient) -> None:
        branches = await (await client.create("abc")).fork(5)
        for index, branch in enumerate(branches):
            await branch.extend("x" * (index + 1))
        completions = await asyncio.gather(*(branch.complete(max_tokens=2) for branch in branches))
        assert [each.text for each in completions] == ["ef", "fg", "gh", "hi", "ij"]

    run(address, scenario)


def test_groups_and_the_client_release(address: str, service: FakeService) -> None:
    """Catches contexts left behind by the asyncio twin."""

    async def scenario(client: AsyncClient) -> None:
        root = await client.create("abc")
        async with await root.fork(2) as group:
            assert len(service.contexts) == 3
        assert list(service.contexts) == [root.id]
        assert await group.release() == Released()

    run(address, scenario)
    assert service.contexts == {}


def test_lost_answers_are_asked_for_again(address: str, service: FakeService) -> None:
    """Catches a retry that blocks the loop, repeats too much or too little."""

    async def scenario(client: AsyncClient) -> None:
        for method in ("Create", "Extend", "Truncate"):
            service.faults[method].append(Fault(Unavailable("down"), is_late=True))
        service.faults["Generate"].append(Fault(Unavailable("down")))
        root = await client.create("abc")
        assert (await root.extend(token_ids=[100])).length == 4
        assert (await root.truncate(3)).length == 3
        assert (await root.complete(max_tokens=1)).text == "d"
        assert len(service.contexts) == 1

    run(address, scenario)


def test_closing_early_then_going_on(address: str, service: FakeService) -> None:
    """Catches a stream that runs on after its block, and a next call with a stale length."""

    async def scenario(client: AsyncClient) -> None:
        root = await client.create("abc")
        service.faults["Generate"].append(Hang(after_messages=2))
        async with root.generate(max_tokens=9) as stream:
            assert (await anext(stream)).text == "d"
            assert await asyncio.to_thread(service.hangs.wait, 5)
        with pytest.raises(Cancelled):
            await stream.result()
        assert (await root.extend("x")).length == 6

    run(address, scenario)


def test_cancelling_a_task_cancels_its_stream(address: str, service: FakeService) -> None:
    """Catches a generation that goes on for nobody, and a handle left unusable by it."""

    async def scenario(client: AsyncClient) -> None:
        root = await client.create("abc")
        service.faults["Generate"].append(Hang(after_messages=1))
        task = asyncio.create_task(root.complete(max_tokens=9))
        assert await asyncio.to_thread(service.hangs.wait, 5)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await asyncio.to_thread(service.was_cancelled.wait, 5)
        assert (await root.extend("x")).length == 5

    run(address, scenario)


def test_cancelling_a_block_still_releases(address: str, service: FakeService) -> None:
    """Catches contexts that a time-out around a block leaves behind."""

    async def block(client: AsyncClient) -> None:
        async with await client.create("abc") as root:
            await root.fork(2)
            service.faults["Get"].append(Hang())
            await root.refresh()

    async def scenario(client: AsyncClient) -> None:
        task = asyncio.create_task(block(client))
        assert await asyncio.to_thread(service.hangs.wait, 5)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert service.contexts == {}

    run(address, scenario)


def test_deadlines_and_errors(address: str, service: FakeService) -> None:
    """Catches an asyncio call without a deadline, or one that raises gRPC's own exception."""

    async def scenario(client: AsyncClient) -> None:
        root = await client.create("abc")
        service.faults["Get"].append(Hang())
        with pytest.raises(DeadlineExceeded):
            await root.refresh(timeout=0.05)
        with pytest.raises(NotFound):
            await client.attach("r1.nothing")
        with pytest.raises(InvalidRequest):
            await client.create("")

    run(address, scenario)


def test_a_client_may_be_made_before_its_loop(address: str) -> None:
    """Catches a channel bound to a loop that never runs."""
    client = AsyncClient(address)

    async def main() -> None:
        handle: AsyncContextHandle = await client.create("abc")
        assert handle.length == 3
        await client.close()
        await client.close()
        with pytest.raises(InvalidRequest, match="closed"):
            await client.create("abc")

    asyncio.run(main())
