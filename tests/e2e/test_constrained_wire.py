"""Constraints and tool calls the whole way: SDK, wire, compiler, engine and back."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from server.harness import run
from server.real_engine import really_serving, tiny_engine

from agentkv import (
    AsyncClient,
    Choices,
    Continued,
    FinishReason,
    InvalidRequest,
    JsonSchema,
    Lark,
    Reason,
    Regex,
    Tool,
    Tools,
)

pytestmark = pytest.mark.slow

POINT = JsonSchema(
    {
        "type": "object",
        "properties": {"x": {"type": "integer", "minimum": -99, "maximum": 99}},
        "required": ["x"],
        "additionalProperties": False,
    }
)
WEATHER = Tool(
    "weather",
    "Tells the weather.",
    {
        "type": "object",
        "properties": {"city": {"enum": ["Rome", "Oslo"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
)


@asynccontextmanager
async def connected() -> AsyncIterator[AsyncClient]:
    core = tiny_engine(eos_token_ids=(2,))
    async with (
        really_serving(core) as served,
        AsyncClient(served.server.address) as client,
    ):
        yield client
    core.flush_cache()
    assert core.observer.pool().free == core.observer.pool().total


def test_every_form_travels() -> None:
    """Catches a form that the SDK, the wire or the server turns into another."""

    async def scenario() -> None:
        async with connected() as client, await client.create("hello") as root:
            for constraint, texts in (
                (Choices(["yes", "no"]), ("yes", "no")),
                (Regex("a{5}"), ("aaaaa",)),
                (Lark('start: "x" "y"'), ("xy",)),
                (JsonSchema({"const": "é"}), ('"é"',)),
            ):
                async with await root.fork_one() as branch:
                    done = await branch.complete(constraint=constraint, temperature=1.0)
                    assert done.text in texts and done.finish_reason is FinishReason.STOP

    run(scenario())


def test_branches_of_one_call_and_their_forks_stay_in_their_grammar() -> None:
    """Catches a grammar that one branch, or a fork in the middle of it, loses."""

    async def scenario() -> None:
        async with connected() as client, await client.create("hello") as root:
            branches = await root.complete_branches(
                4, constraint=POINT, temperature=1.0, seed=7, max_tokens=3
            )
            for branch in branches:
                assert branch.completion.finish_reason is FinishReason.LENGTH
                async with await branch.context.fork_one() as fork:
                    rest = await fork.complete(constraint=Continued(), temperature=1.0)
                    assert set(json.loads(branch.text + rest.text)) == {"x"}

    run(scenario())


def test_a_tool_call_is_a_finish_with_its_arguments() -> None:
    """Catches a call that ends as mere text, or arguments that are not parsed."""

    async def scenario() -> None:
        async with connected() as client, await client.create("hello") as root:
            tools = Tools([WEATHER], "required")
            done = await root.complete(constraint=tools, temperature=1.0)
            assert done.finish_reason is FinishReason.TOOL_CALL
            (call,) = done.tool_calls
            assert call.name == "weather" and call.arguments["city"] in ("Rome", "Oslo")
            async with await root.fork_one(at=5) as branch:
                free = await branch.complete(constraint=Tools([WEATHER]), max_tokens=8)
                assert free.finish_reason is not FinishReason.TOOL_CALL and free.tool_calls == ()

    run(scenario())


def test_what_is_wrong_is_refused_and_changes_nothing() -> None:
    """Catches a refusal that forks first, loses the context, or names no field."""

    async def scenario() -> None:
        async with connected() as client, await client.create("hello") as root:
            with pytest.raises(InvalidRequest) as caught:
                await root.complete(constraint=Regex("(a"))
            assert caught.value.reason is Reason.GRAMMAR_REJECTED
            assert list(caught.value.violations) == ["constraint.regex"]
            with pytest.raises(InvalidRequest):
                await root.complete_branches(3, constraint=JsonSchema("{"))
            with pytest.raises(InvalidRequest) as caught:
                await root.complete(constraint=POINT, ignore_eos=True)
            assert list(caught.value.violations) == ["sampling.ignore_eos"]
            with pytest.raises(InvalidRequest) as caught:
                await root.complete(constraint=Continued())
            assert list(caught.value.violations) == ["constraint.continued"]
            info = await client.server_info()
            assert info.counters.num_contexts == 1
            assert (await root.complete(constraint=Choices(["ok"]))).text == "ok"

    run(scenario())


def test_a_bomb_disturbs_nobody() -> None:
    """Catches a hostile grammar that holds up, or ends, the streams beside it."""

    async def scenario() -> None:
        async with connected() as client, await client.create("hello") as root:
            alone = await root.fork_one()
            expected = (await alone.complete(constraint=POINT, temperature=1.0, seed=1)).text
            bombs: list[Regex | JsonSchema] = [
                Regex("((a{1,1000}){1,1000}){1,1000}"),
                Regex("(.*a.{20}){10}"),
                JsonSchema('{"items":' * 2000 + "{}" + "}" * 2000),
            ]
            branches = await root.fork(len(bombs) + 1)
            results = await asyncio.gather(
                branches[0].complete(constraint=POINT, temperature=1.0, seed=1),
                *(
                    branch.complete(constraint=bomb, temperature=1.0, max_tokens=40)
                    for branch, bomb in zip(branches[1:], bombs, strict=True)
                ),
                return_exceptions=True,
            )
            healthy = results[0]
            assert not isinstance(healthy, BaseException)
            assert set(json.loads(healthy.text)) == set(json.loads(expected)) == {"x"}
            assert isinstance(results[-1], InvalidRequest)

    run(scenario())
