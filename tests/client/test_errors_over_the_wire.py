"""Every failure of a call, as gRPC or the server raises it, is one of our exceptions."""

import asyncio

import grpc
import pytest
from client.fake_service import FakeService, Fault, Hang

from agentkv import AsyncClient, Client, DeadlineExceeded, PoolExhausted, Reason
from agentkv.client.retry import NO_RETRY
from agentkv.errors import InternalError
from agentkv.status import TABLE, WITHOUT_REASON

FAILURES = [code for code in grpc.StatusCode if code is not grpc.StatusCode.OK]


@pytest.mark.parametrize("code", FAILURES)
def test_every_code_of_grpc_is_mapped(
    address: str, service: FakeService, code: grpc.StatusCode
) -> None:
    """Catches a foreign exception that an `except AgentKVError` misses, on either stack."""
    expected = WITHOUT_REASON.get(code, InternalError)
    with Client(address, retry=NO_RETRY) as client:
        root = client.create("abc").detach()
        for method in ("Get", "Generate"):
            service.faults[method].extend([Fault(code), Fault(code)])
        with pytest.raises(expected) as caught:
            root.refresh()
        assert caught.value.reason is None
        with pytest.raises(expected):
            root.complete(max_tokens=1)

    async def scenario() -> None:
        async with AsyncClient(address, retry=NO_RETRY) as client:
            with pytest.raises(expected):
                await client.attach(root.id)
            handle = await client.attach(root.id)
            with pytest.raises(expected):
                await handle.complete(max_tokens=1)

    asyncio.run(scenario())


@pytest.mark.parametrize("reason", Reason)
def test_every_reason_is_mapped(address: str, service: FakeService, reason: Reason) -> None:
    """Catches a reason lost on a real connection, where it travels in trailing metadata."""
    error = TABLE[reason].error("Too bad.", reason=reason, metadata={"actual_length": 7})
    service.faults["GetServerInfo"].append(Fault(error))
    with Client(address, retry=NO_RETRY) as client, pytest.raises(type(error)) as caught:
        client.server_info()
    assert caught.value.reason is reason
    assert caught.value.message == "Too bad."
    assert caught.value.metadata["actual_length"] == "7"


def test_a_full_pool_says_when_to_come_back(client: Client, service: FakeService) -> None:
    """Catches a hint that stays in the transport."""
    service.faults["Create"].append(Fault(PoolExhausted("Full.", retry_after=0.25)))
    with pytest.raises(PoolExhausted) as caught:
        client.create("abc")
    assert caught.value.retry_after == 0.25


def test_every_call_has_a_deadline(client: Client, service: FakeService) -> None:
    """Catches a call that outlives its time-out, or a time-out for one call kept for the next."""
    service.faults["Get"].append(Hang())
    root = client.create("abc")
    with pytest.raises(DeadlineExceeded):
        root.refresh(timeout=0.05)
    assert service.was_cancelled.wait(5)
    assert root.refresh().length == 3


def test_the_clients_timeout_is_the_default(address: str, service: FakeService) -> None:
    """Catches a default that no call uses."""
    service.faults["Create"].append(Hang())
    with Client(address, timeout=0.05) as client, pytest.raises(DeadlineExceeded):
        client.create("abc")
