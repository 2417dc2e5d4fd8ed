"""Kind Q of the case log: the transport. Case 114 stands in `tests/server`."""

import asyncio
from typing import Any

import grpc.aio
import pytest
from server.harness import received_of, run
from server.real_engine import really_serving

from agentkv.v1 import agentkv_pb2 as pb

NUM_STREAMS = 50
LONG = pb.SamplingOptions(max_tokens=2000)
SHORT = pb.SamplingOptions(max_tokens=2)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["cancel", "deadline"])
def test_case_112_handler_blocks_when_it_yields_after_the_client_left(how: str) -> None:
    """Catches a handler that waits for ever for a client that is gone, and work done for it."""

    async def leave(stub: Any, root: str) -> None:
        request = pb.GenerateRequest(context_id=root, sampling=LONG)
        call = stub.Generate(request, timeout=1.0 if how == "deadline" else None)
        if how == "cancel":
            for _ in range(2):
                await call.read()
            call.cancel()
        left = asyncio.CancelledError if how == "cancel" else grpc.aio.AioRpcError
        with pytest.raises(left):
            await received_of(call, [])

    async def scenario() -> None:
        async with really_serving() as served:
            stub = served.stub
            create = pb.CreateRequest(token_ids=pb.TokenIds(ids=[5] * 8))
            roots = [(await stub.Create(create)).context.id for _ in range(NUM_STREAMS)]
            await asyncio.gather(*[leave(stub, root) for root in roots])
            await served.server._open_calls.wait_none()
            await served.settled(lambda view: view.num_running + view.num_waiting == 0)
            for root in roots:
                request = pb.GenerateRequest(context_id=root, sampling=SHORT)
                answers = [message async for message in stub.Generate(request)]
                assert sum(len(message.chunk.token_ids) for message in answers) == 2

    run(scenario())
