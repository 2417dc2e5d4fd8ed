"""Saving and restoring in both clients, over a real connection."""

import asyncio
from datetime import UTC, datetime

import pytest
from client.fake_service import FakeService, Fault

from agentkv import AsyncClient, Client, LeaseMode, NotFound, Reason, SnapshotInfo
from agentkv.errors import Unavailable
from agentkv.v1 import agentkv_pb2 as pb

INFO = SnapshotInfo("mine", datetime.fromtimestamp(1_700_000_000, UTC), "alphabet", 2, 3, 2, 4096)


def test_every_option_travels_and_restored_contexts_are_owned(
    client: Client, service: FakeService
) -> None:
    """Catches an option that is not sent, and contexts that nobody would ever release."""
    root = client.create("abc")
    assert root.save("mine", recursive=True, with_kv=False, overwrite=True) == INFO
    (request,) = service.requests("Save")
    assert request == pb.SaveRequest(
        context_id=root.id, name="mine", recursive=True, tokens_only=True, overwrite=True
    )
    assert client.list_snapshots() == [INFO]
    with client.restore("mine", with_kv=False, lease=LeaseMode.PIN).root as copy:
        (asked,) = service.requests("Restore")
        assert asked.tokens_only and asked.lease.mode == pb.LEASE_MODE_PIN
        branch_id = copy.id.replace("2", "3")
        assert branch_id in service.contexts
    assert set(service.contexts) == {root.id}  # the branch went with what it was forked from
    client.delete_snapshot("mine")
    with pytest.raises(NotFound) as refused:
        client.restore("mine")
    assert refused.value.reason is Reason.SNAPSHOT_NOT_FOUND


def test_a_restore_whose_answer_is_lost_is_not_done_twice(
    client: Client, service: FakeService
) -> None:
    """Catches a repeat without its request id, which would leave contexts that nobody knows."""
    root = client.create("abc")
    root.save("mine")
    service.faults["Restore"].append(Fault(Unavailable("Away."), is_late=True))
    restored = client.restore("mine")
    assert len(restored) == 2 and len(service.contexts) == 3
    assert restored.find(root.id) is restored.root
    assert restored.num_kv_tokens == 3 and restored.kv_refusal == "no room"
    with pytest.raises(KeyError):
        restored.find("another")


def test_the_asyncio_client_does_the_same(address: str, service: FakeService) -> None:
    """Catches a twin that forgets a call, or to wait for it."""

    async def main() -> None:
        async with AsyncClient(address) as client:
            root = await client.create("abc")
            assert await root.save("mine") == INFO
            assert await client.list_snapshots() == [INFO]
            restored = await client.restore("mine")
            assert [handle.length for handle in restored] == [3, 3]
            await client.delete_snapshot("mine")
            assert await client.list_snapshots() == []

    asyncio.run(main())
    assert service.contexts == {}
