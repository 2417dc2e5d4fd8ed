"""A tool is called and its result told, through a real server on the embedded model."""

import asyncio

import pytest

from agentkv import AsyncClient, Tool, Tools
from agentkv.config import EngineConfig, ServerConfig
from agentkv.engine.async_engine import AsyncEngine
from agentkv.engine.build import build_engine
from agentkv.server.main import Server

WEATHER = Tool(
    "weather",
    "Tells the weather.",
    {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 12}},
        "required": ["city"],
        "additionalProperties": False,
    },
)
QUESTION = {"role": "user", "content": "Is it raining in Oslo?"}


@pytest.mark.slow
def test_branches_are_told_different_results_of_one_call() -> None:
    """Catches a call without arguments, and a turn that a tool's result can not follow."""

    async def scenario() -> None:
        engine = AsyncEngine(build_engine(EngineConfig(model="smollm2", num_blocks=128)))
        async with (
            Server(engine, ServerConfig(port=0)) as server,
            AsyncClient(server.address) as client,
            await client.create(messages=[QUESTION], tools=[WEATHER]) as chat,
        ):
            asked = await chat.complete(constraint=Tools([WEATHER], "required"))
            assert asked.finish_reason == "tool_call"
            (call,) = asked.tool_calls
            assert call.name == "weather" and set(call.arguments) == {"city"}
            length = chat.length
            for branch, result in zip(await chat.fork(2), ("rain", "sun"), strict=True):
                await branch.extend(messages=[{"role": "tool", "content": result}])
                assert branch.length > length
                assert (await branch.complete(max_tokens=4)).token_ids
            assert chat.length == length, "a branch's turns are its own"

    asyncio.run(scenario())
