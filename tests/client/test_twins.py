"""The blocking and the asyncio classes offer the same, and both work on any transport."""

import asyncio
import inspect
from typing import Any

import pytest

import agentkv
from agentkv.client.operation import Call
from agentkv.errors import InvalidRequest
from agentkv.v1 import agentkv_pb2 as pb

TWINS = [
    (agentkv.Client, agentkv.AsyncClient),
    (agentkv.ContextHandle, agentkv.AsyncContextHandle),
    (agentkv.ContextGroup, agentkv.AsyncContextGroup),
    (agentkv.GenerateStream, agentkv.AsyncGenerateStream),
    (agentkv.BranchStream, agentkv.AsyncBranchStream),
    (agentkv.WatchStream, agentkv.AsyncWatchStream),
]


def public(class_: type) -> dict[str, Any]:
    """Lists what a class offers, by name."""
    return {name: value for name, value in inspect.getmembers(class_) if name[0] != "_"}


@pytest.mark.parametrize(("blocking", "awaiting"), TWINS)
def test_twins_offer_the_same(blocking: type, awaiting: type) -> None:
    """Catches an option added to one client and forgotten in the other."""
    assert public(blocking).keys() == public(awaiting).keys()
    for name, member in public(blocking).items():
        if callable(member):
            twin = public(awaiting)[name]
            mine, its = inspect.signature(member), inspect.signature(twin)
            assert [str(p).replace("Async", "") for p in its.parameters.values()] == [
                str(p) for p in mine.parameters.values()
            ], name


class Offline:
    """A transport without a server: answers Create, refuses the rest."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.is_closed = False

    def unary(self, call: Call) -> Any:
        self.calls.append(call)
        if call.method == "Create":
            return pb.CreateResponse(context=pb.Context(id="c", root_id="c", length=3))
        if call.method == "Release":
            return pb.ReleaseResponse(num_released=1)
        raise InvalidRequest(f"No {call.method} here.")

    def stream(self, call: Call) -> Any:
        raise InvalidRequest(f"No {call.method} here.")

    def close(self) -> None:
        self.is_closed = True


class AsyncOffline:
    """The same for an asyncio client."""

    def __init__(self) -> None:
        self.inner = Offline()

    async def unary(self, call: Call) -> Any:
        return self.inner.unary(call)

    def stream(self, call: Call) -> Any:
        return self.inner.stream(call)

    async def close(self) -> None:
        self.inner.close()


def test_a_transport_can_be_replaced() -> None:
    """Catches a client that reaches past the seam users test against."""
    transport = Offline()
    with agentkv.Client(transport=transport, timeout=5) as client:
        root = client.create("abc")
        with pytest.raises(InvalidRequest, match="Generate"):
            root.generate(max_tokens=1)
    assert transport.is_closed
    assert [call.method for call in transport.calls] == ["Create", "Release"]
    assert transport.calls[0].timeout == pytest.approx(5, abs=1)


def test_an_async_transport_can_be_replaced() -> None:
    """Catches the same in the asyncio client."""
    transport = AsyncOffline()

    async def main() -> None:
        async with agentkv.AsyncClient(transport=transport) as client:
            await client.create("abc")

    asyncio.run(main())
    assert transport.inner.is_closed
    assert [call.method for call in transport.inner.calls] == ["Create", "Release"]
