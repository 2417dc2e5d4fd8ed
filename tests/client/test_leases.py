"""Leases and watching in both clients, over a real connection."""

import asyncio
from datetime import UTC, datetime

import pytest
from client.fake_service import FakeService, Fault

from agentkv import (
    AsyncClient,
    ChangeKind,
    Client,
    ContextChange,
    InvalidRequest,
    LeaseInfo,
    LeaseMode,
    LeaseOptions,
    LeaseReduction,
    PressureChange,
    PressureLevel,
    WatchSnapshot,
)
from agentkv.errors import DeadlineExceeded, Unavailable
from agentkv.v1 import agentkv_pb2 as pb


def test_a_lease_is_asked_for_and_what_was_granted_is_shown(
    client: Client, service: FakeService
) -> None:
    """Catches an option that is not sent, or an answer that shows what was asked for."""
    root = client.create("abc", lease=LeaseOptions(LeaseMode.PIN, ttl=10.0, may_reduce=True))
    (request,) = service.requests("Create")
    assert request.lease == pb.LeaseOptions(mode=pb.LEASE_MODE_PIN, ttl=10.0, may_reduce=True)
    branch = root.fork_one(lease=LeaseMode.DROPPABLE)
    (request,) = service.requests("Fork")
    assert request.lease == pb.LeaseOptions(mode=pb.LEASE_MODE_DROPPABLE)
    granted = branch.update_lease(LeaseOptions(LeaseMode.PIN, ttl=500.0), recursive=True)
    expire_time = datetime.fromtimestamp(1_700_000_100, UTC)
    assert granted == branch.info.lease
    assert granted == LeaseInfo(LeaseMode.PIN, 100.0, expire_time, (LeaseReduction.MAX_TTL,))
    assert root.park().mode is LeaseMode.PARK
    root.update_lease()
    first, park, renewed = service.requests("UpdateLease")
    assert first.recursive and not park.recursive
    assert park.lease == pb.LeaseOptions(mode=pb.LEASE_MODE_PARK)
    assert renewed.lease == pb.LeaseOptions()
    assert client.pool is not None
    assert (client.pool.level, client.pool.reclaimable_blocks) == (PressureLevel.OK, 4)


def test_a_lease_is_asked_for_again_when_the_server_was_away(
    client: Client, service: FakeService
) -> None:
    """Catches a call that is safe to repeat, and is not repeated."""
    root = client.create("abc")
    service.faults["UpdateLease"].append(Fault(Unavailable("Away.")))
    assert root.update_lease(LeaseMode.PIN).mode is LeaseMode.PIN


def test_a_mode_that_is_not_known_cannot_be_asked_for(client: Client) -> None:
    """Catches an answer's UNKNOWN sent back as if it were a wish."""
    with pytest.raises(InvalidRequest):
        client.create("abc", lease=LeaseMode.UNKNOWN)


def test_a_watch_yields_typed_values(client: Client) -> None:
    """Catches pieces of a snapshot shown one by one, or a message nobody can read."""
    roots = [client.create("abc"), client.create("defg")]
    with client.watch(timeout=5) as events:
        snapshot, change, pressure = (next(events) for _ in range(3))
    assert isinstance(snapshot, WatchSnapshot)
    assert [context.id for context in snapshot.contexts] == [root.id for root in roots]
    assert isinstance(change, ContextChange)
    assert (change.kind, change.context_id) == (ChangeKind.EXPIRING, roots[0].id)
    assert change.lease.mode is LeaseMode.UNKNOWN and change.parent_id is None
    assert isinstance(pressure, PressureChange) and pressure.pool.level is PressureLevel.OK
    assert [event.sequence for event in (snapshot, change, pressure)] == [2, 3, 4]
    assert next(iter(events), None) is None


def test_a_watch_goes_on_when_the_server_ends_it(client: Client, service: FakeService) -> None:
    """Catches a watch that is over after the server's longest call; unless a time was named."""
    client.create("abc")
    service.faults["Watch"].append(Fault(DeadlineExceeded("Over."), after_messages=2))
    with client.watch() as events:
        told = [type(next(events)) for _ in range(6)]
    assert told == [WatchSnapshot, ContextChange, PressureChange] * 2
    assert len(service.requests("Watch")) == 2
    service.faults["Watch"].append(Fault(DeadlineExceeded("Over."), after_messages=2))
    with client.watch(timeout=5) as events, pytest.raises(DeadlineExceeded):
        for _ in events:
            pass


def test_an_async_watch(address: str) -> None:
    """Catches the asyncio twin left behind."""

    async def scenario() -> None:
        async with AsyncClient(address) as client:
            root = await client.create("abc", lease=LeaseMode.PARK)
            assert root.info.lease.mode is LeaseMode.RETAIN, "the fake grants nothing at Create"
            assert (await root.park()).mode is LeaseMode.PARK
            async with client.watch(timeout=5) as events:
                async for event in events:
                    if isinstance(event, PressureChange):
                        break
            assert [item async for item in events] == []

    asyncio.run(scenario())
