"""The whole way: SDK, wire, engine and model, compared with plain transformers at the end.

Each scenario leaves the pool as it found it: every block free again once the cache is flushed.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import cache
from typing import Any, NamedTuple

import pytest
from server.harness import run
from server.real_engine import MAX_LENGTH, ReallyServed, really_serving, tiny_engine
from slow_twin import PlainModel
from tiny_engines import TEXT_VOCAB_SIZE
from tiny_models import build_tiny_model

from agentkv.client.async_client import AsyncClient
from agentkv.client.async_context_handle import AsyncContextHandle
from agentkv.client.completion import BranchFinish, Completion, FinishReason
from agentkv.engine.conversation import ChatMessage
from agentkv.errors import (
    AgentKVError,
    ContextBusy,
    ContextMoved,
    InvalidRequest,
    NotFound,
    PoolExhausted,
    Reason,
)

pytestmark = pytest.mark.slow

PROMPT = [(13 * number + 7) % 250 + 3 for number in range(37)]


@cache
def plain() -> PlainModel:
    return PlainModel(
        build_tiny_model("llama", vocab_size=TEXT_VOCAB_SIZE, max_position_embeddings=MAX_LENGTH)
    )


class Connected(NamedTuple):
    """A client of a running server, and the server's inside."""

    client: AsyncClient
    served: ReallyServed


@asynccontextmanager
async def connected(**engine_settings: Any) -> AsyncIterator[Connected]:
    """Serves a tiny model to one client; at the end every block must be free again."""
    core = tiny_engine(**engine_settings)
    async with really_serving(core) as served:
        async with AsyncClient(served.server.address) as client:
            yield Connected(client, served)
        await served.settled(lambda view: not (view.num_running or view.num_waiting))
    core.flush_cache()
    view = core.view()
    assert (view.num_contexts, view.pool.free) == (0, view.pool.total)


def check(before: Sequence[int], completion: Completion) -> None:
    """Compares a greedy completion with the plain model."""
    plain().check_greedy(before, completion.token_ids, completion.logprobs)


def test_every_verb_from_end_to_end() -> None:
    """Catches a verb that means something else by the time it reaches the model."""

    async def scenario() -> None:
        async with connected() as (client, _):
            root = await client.create(token_ids=PROMPT, labels={"purpose": "test"})
            assert (root.length, dict(root.info.labels)) == (37, {"purpose": "test"})
            first = await root.complete(max_tokens=6, logprobs=True)
            check(PROMPT, first)

            branch, twin = await root.fork(2, at=21)
            extension = await branch.extend(token_ids=[5, 6, 7], logprobs=True)
            plain().check_logprobs(PROMPT[:21], [5, 6, 7], extension.logprobs)
            check([*PROMPT[:21], 5, 6, 7], await branch.complete(max_tokens=5, logprobs=True))
            check(PROMPT[:21], await twin.complete(max_tokens=5, logprobs=True))

            scores = await root.score([[9, 8], [1]])
            for score in scores:
                before = [*PROMPT, *first.token_ids]
                plain().check_logprobs(before, score.token_ids, score.logprobs)

            await root.truncate(30)
            check(PROMPT[:30], await root.complete(max_tokens=4, logprobs=True))
            assert (await root.read_tokens())[:30] == PROMPT[:30]

            listed = [context.id async for context in client.list()]
            assert sorted(listed) == sorted([root.id, branch.id, twin.id])
            info = await client.server_info()
            assert info.model.vocab_size == TEXT_VOCAB_SIZE
            assert (await root.refresh()).num_children == 2
            assert (await twin.release()).num_released == 1
            assert (await root.release(recursive=True)).num_released == 2
            assert [context async for context in client.list()] == []

    run(scenario())


def test_branches_generate_in_one_stream() -> None:
    """Catches branches that are mixed up on their way through one stream."""

    async def scenario() -> None:
        async with connected() as (client, _):
            root = await client.create(token_ids=PROMPT)
            branches = await root.complete_branches(4, at=33, max_tokens=7, logprobs=True)
            assert len({branch.context.id for branch in branches}) == 4
            for branch in branches:
                check(PROMPT[:33], branch.completion)
                expected = [*PROMPT[:33], *branch.completion.token_ids]
                assert await branch.context.read_tokens() == expected
            sampled = await root.complete_branches(4, max_tokens=12, temperature=1.0, seed=4)
            assert len({branch.completion.token_ids for branch in sampled}) == 4
            again = await root.complete_branches(4, max_tokens=12, temperature=1.0, seed=4)
            assert [b.completion.token_ids for b in again] == [
                b.completion.token_ids for b in sampled
            ]

    run(scenario())


def test_two_generations_at_once() -> None:
    """Catches streams whose tokens end up in one another, or one that waits for the other."""

    async def scenario() -> None:
        async with connected() as (client, _):
            prompts = PROMPT, PROMPT[::-1]
            handles = [await client.create(token_ids=prompt) for prompt in prompts]
            streams = [handle.generate(max_tokens=60, logprobs=True) for handle in handles]
            async with streams[0], streams[1]:
                results = await asyncio.gather(*(stream.result() for stream in streams))
            for prompt, result in zip(prompts, results, strict=True):
                assert (len(result.token_ids), result.finish_reason) == (60, FinishReason.LENGTH)
                check(prompt, result)

    run(scenario())


def test_a_cancelled_stream_leaves_its_last_committed_token() -> None:
    """Catches tokens lost or half-committed by a cancel, and a context that stays busy."""

    async def scenario() -> None:
        async with connected() as (client, served):
            root = await client.create(token_ids=PROMPT)
            async with root.generate(max_tokens=2000, logprobs=True) as stream:
                async for _ in stream:
                    if len(stream.token_ids_so_far) >= 5:
                        break
                seen = list(stream.token_ids_so_far)
            await served.settled(lambda view: not view.num_running)
            info = await root.refresh()
            tokens = await root.read_tokens()
            assert info.length == len(tokens) < 2000
            assert tokens[: 37 + len(seen)] == [*PROMPT, *seen]
            check(tokens, await root.complete(max_tokens=4, logprobs=True))

    run(scenario())


def test_release_during_a_stream_wins() -> None:
    """Catches a stream that goes on on blocks that were given back."""

    async def scenario() -> None:
        async with connected() as (client, _):
            root = await client.create(token_ids=PROMPT)
            sibling = await root.fork_one()
            async with root.generate(max_tokens=4000) as stream:
                await anext(stream)
                other = await client.attach(root.id)
                await other.release()
                with pytest.raises(NotFound) as caught:
                    await stream.result()
            assert caught.value.reason is Reason.CONTEXT_RELEASED
            check(PROMPT, await sibling.complete(max_tokens=5, logprobs=True))

    run(scenario())


def test_text_goes_in_and_comes_out() -> None:
    """Catches a prompt that is echoed, text that differs from its tokens, a stop that leaks."""

    async def scenario() -> None:
        async with connected() as (client, served):
            tokenizer = served.engine.tokenizer
            messages = [{"role": "user", "content": "the story"}]
            root = await client.create(messages=messages)
            prompt = await root.read_tokens()
            assert prompt == list(tokenizer.encode_chat([ChatMessage("user", "the story")]))
            await root.extend("the end")
            assert (await root.read_tokens())[len(prompt) :] == list(tokenizer.encode("the end"))
            whole = await (await root.fork_one()).complete(max_tokens=24, ignore_eos=True)
            decoded = tokenizer.decode(whole.token_ids)
            assert whole.text == decoded.rstrip("\ufffd")  # half a character is no text
            pieces: list[str] = []
            branch = await root.fork_one()
            async with branch.generate(max_tokens=24, ignore_eos=True) as stream:
                async for chunk in stream:
                    pieces.append(chunk.text)
            assert "".join(pieces) == whole.text

            pairs = (whole.text[i : i + 2] for i in range(4, len(whole.text)))
            stop = next(pair for pair in pairs if pair.isascii() and pair.isprintable())
            cut = whole.text.index(stop)
            stopped = await (await root.fork_one()).complete(
                max_tokens=24, ignore_eos=True, stop=(stop,)
            )
            assert (stopped.text, stopped.finish_reason, stopped.stop) == (
                whole.text[:cut],
                FinishReason.STOP,
                stop,
            )

    run(scenario())


def test_events_of_branches_tell_whose_they_are() -> None:
    """Catches a finish that comes before a branch's last chunk, or twice."""

    async def scenario() -> None:
        async with connected() as (client, _):
            root = await client.create(token_ids=PROMPT)
            ended: dict[int, Completion] = {}
            async with root.generate_branches(3, max_tokens=9, temperature=1.0, seed=1) as stream:
                async for event in stream:
                    assert event.branch not in ended
                    if isinstance(event, BranchFinish):
                        ended[event.branch] = event.completion
            assert sorted(ended) == [0, 1, 2]
            assert all(len(completion.token_ids) == 9 for completion in ended.values())

    run(scenario())


Refused = Callable[[AsyncContextHandle], Awaitable[object]]
REFUSED: dict[str, tuple[Refused, type[AgentKVError], Reason]] = {
    "a token beyond the vocabulary": (
        lambda root: root.extend(token_ids=[TEXT_VOCAB_SIZE]),
        InvalidRequest,
        Reason.TOKEN_OUT_OF_RANGE,
    ),
    "a stop token beyond the vocabulary": (
        lambda root: root.complete(stop_token_ids=(TEXT_VOCAB_SIZE + 3,)),
        InvalidRequest,
        Reason.TOKEN_OUT_OF_RANGE,
    ),
    "a fork beyond the length": (
        lambda root: root.fork(at=38),
        InvalidRequest,
        Reason.POSITION_OUT_OF_RANGE,
    ),
    "a truncation beyond the length": (
        lambda root: root.truncate(38),
        InvalidRequest,
        Reason.POSITION_OUT_OF_RANGE,
    ),
    "too many branches": (
        lambda root: root.fork(1 << 20),
        InvalidRequest,
        Reason.INVALID_REQUEST,
    ),
    "more than the model's longest": (
        lambda root: root.extend(token_ids=[1] * MAX_LENGTH),
        InvalidRequest,
        Reason.CONTEXT_TOO_LONG,
    ),
    "more than the pool": (
        lambda root: root.extend(token_ids=[1] * 700),
        PoolExhausted,
        Reason.KV_BLOCKS_EXHAUSTED,
    ),
    "an empty continuation": (
        lambda root: root.score([[1], []]),
        InvalidRequest,
        Reason.INVALID_REQUEST,
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_changes_nothing(name: str) -> None:
    """Catches a refusal that took blocks, tokens or the context's turn on its way."""
    call, kind, reason = REFUSED[name]

    async def scenario() -> None:
        async with connected(num_blocks=32) as (client, served):
            root = await client.create(token_ids=PROMPT)
            before = await served.settled(lambda view: not view.num_running)
            with pytest.raises(kind) as caught:
                await call(root)
            assert caught.value.reason is reason
            after = await served.settled(lambda view: not view.num_running)
            assert after.pool == before.pool
            assert await root.read_tokens() == PROMPT
            check(PROMPT, await root.complete(max_tokens=3, logprobs=True))

    run(scenario())


def test_two_handles_of_one_context_cannot_both_change_it() -> None:
    """Catches a second change that slips in, and a stale length that appends twice."""

    async def scenario() -> None:
        async with connected() as (client, served):
            root = await client.create(token_ids=PROMPT)
            other = await client.attach(root.id)
            async with root.generate(max_tokens=3000) as stream:
                await anext(stream)
                with pytest.raises((ContextBusy, ContextMoved)):
                    await other.extend(token_ids=[1])
            await served.settled(lambda view: not view.num_running)
            with pytest.raises(ContextMoved):
                await other.extend(token_ids=[1])
            await other.refresh()
            await other.extend(token_ids=[1])
            assert (await other.read_tokens())[-1] == 1

    run(scenario())
