"""Leases and watching over the wire: what travels, what is refused, and what ends by itself."""

import asyncio
from typing import Any

import pytest
from server.fake_engine import FakeEngine
from server.harness import failure_of, run, serving
from server.real_engine import really_serving, tiny_engine

from agentkv.config import LeaseConfig
from agentkv.errors import Reason
from agentkv.v1 import agentkv_pb2 as pb

MODES = [pb.LEASE_MODE_RETAIN, pb.LEASE_MODE_PIN, pb.LEASE_MODE_PARK, pb.LEASE_MODE_DROPPABLE]
PROMPT = pb.CreateRequest(text="Once upon a time")


@pytest.mark.parametrize("mode", MODES)
def test_a_lease_travels_both_ways(mode: pb.LeaseMode.ValueType) -> None:
    """Catches a mode that becomes another, or a field that is not copied."""

    async def scenario() -> None:
        async with serving() as served:
            created = await served.stub.Create(pb.CreateRequest(text="a"))
            assert created.context.lease.mode == pb.LEASE_MODE_RETAIN
            assert created.pool.level == pb.PRESSURE_LEVEL_SOFT
            assert created.pool.reclaimable_blocks == 20
            answer = await served.stub.UpdateLease(
                pb.UpdateLeaseRequest(
                    context_id=created.context.id,
                    lease=pb.LeaseOptions(mode=mode, ttl=7.5, may_reduce=True),
                    recursive=True,
                )
            )
            lease = answer.context.lease
            assert (lease.mode, lease.ttl, answer.num_updated) == (mode, 7.5, 2)
            assert list(lease.reductions) == [pb.LEASE_REDUCTION_MAX_TTL]
            assert lease.expire_time.ToNanoseconds() == 1_700_000_060_500_000_000
            assert answer.context.reclaimable_blocks == 3
            info = await served.stub.GetServerInfo(pb.GetServerInfoRequest())
            limits = info.limits
            assert (limits.default_lease_ttl, limits.max_lease_ttl) == (3600, 86_400)
            assert (limits.max_pinned_blocks, limits.handle_retention) == (32, 86_400)

    run(scenario())


def test_an_unknown_mode_is_refused() -> None:
    """Catches a mode of a newer client taken for the default."""

    async def scenario() -> None:
        async with serving() as served:
            odd: Any = 99
            options = pb.LeaseOptions(mode=odd)
            created = await served.stub.Create(pb.CreateRequest(text="a"))
            for call in (
                served.stub.Create(pb.CreateRequest(text="a", lease=options)),
                served.stub.Fork(pb.ForkRequest(context_id=created.context.id, lease=options)),
                served.stub.UpdateLease(
                    pb.UpdateLeaseRequest(context_id=created.context.id, lease=options)
                ),
            ):
                error = await failure_of(call)
                assert error.reason is Reason.UNSUPPORTED_OPTION
                assert list(error.violations) == ["lease.mode"]
            assert served.engine.calls.count("create") == 1

    run(scenario())


def test_every_kind_of_event_travels() -> None:
    """Catches something that happened and becomes something else, or nothing, on the wire."""

    async def scenario() -> None:
        engine = FakeEngine()
        async with serving(engine) as served:
            created = await served.stub.Create(pb.CreateRequest(text="a"))
            events = []
            async for message in served.stub.Watch(pb.WatchRequest()):
                events += list(message.events)
            assert [event.sequence for event in events] == list(range(1, len(events) + 1))
            snapshot, *changes, pressure = events
            assert [context.id for context in snapshot.snapshot.contexts] == [created.context.id]
            assert snapshot.snapshot.is_first and snapshot.snapshot.is_last
            told = [event.change.kind for event in changes]
            assert told == [value for value in pb.ChangeKind.values() if value]
            assert changes[0].change.context_id == created.context.id
            assert pressure.pressure.level == pb.PRESSURE_LEVEL_SOFT

    run(scenario())


def test_refusals_of_a_real_engine_name_the_numbers() -> None:
    """Catches a pin over the quota, or a time out of range, that is granted or changes a lease."""

    async def scenario() -> None:
        engine = tiny_engine(num_blocks=64, leases=LeaseConfig(pin_quota=0.01))
        async with really_serving(engine) as served:
            created = await served.stub.Create(PROMPT)

            def ask(**options: Any) -> Any:
                return served.stub.UpdateLease(
                    pb.UpdateLeaseRequest(
                        context_id=created.context.id, lease=pb.LeaseOptions(**options)
                    )
                )

            error = await failure_of(ask(mode=pb.LEASE_MODE_PIN))
            assert error.reason is Reason.TENANT_QUOTA
            assert (error.metadata["quota"], error.metadata["limit"]) == ("pins", "0")
            for ttl in (-1.0, 0.0, 86_401.0, float("nan")):
                error = await failure_of(ask(ttl=ttl))
                assert error.reason is Reason.INVALID_REQUEST
                assert list(error.violations) == ["lease.ttl"]
            got = await served.stub.Get(pb.GetRequest(context_id=created.context.id))
            assert got.context == created.context
            reduced = await ask(mode=pb.LEASE_MODE_PIN, may_reduce=True)
            lease = reduced.context.lease
            assert lease.mode == pb.LEASE_MODE_RETAIN
            assert list(lease.reductions) == [pb.LEASE_REDUCTION_PIN_QUOTA]

    run(scenario())


@pytest.mark.slow
def test_an_idle_engine_wakes_up_for_what_is_due() -> None:
    """Catches a lease that expires only when somebody calls, and a context kept until then."""

    async def scenario() -> None:
        leases = LeaseConfig(default_ttl=0.1, handle_retention=0.3, warning=0.02)
        async with really_serving(tiny_engine(leases=leases)) as served:
            call = served.stub.Watch(pb.WatchRequest())
            await call.read()
            created = await served.stub.Create(PROMPT)
            kinds = []
            while pb.CHANGE_KIND_RELEASED not in kinds:
                message = await call.read()
                kinds += [event.change.kind for event in message.events]
            # A thread that comes late has nothing to warn of any more.
            assert [kind for kind in kinds if kind != pb.CHANGE_KIND_EXPIRING] == [
                pb.CHANGE_KIND_CREATED,
                pb.CHANGE_KIND_RESIZED,
                pb.CHANGE_KIND_EXPIRED,
                pb.CHANGE_KIND_RELEASED,
            ]
            error = await failure_of(served.stub.Get(pb.GetRequest(context_id=created.context.id)))
            assert error.reason is Reason.CONTEXT_NOT_FOUND
            call.cancel()

    run(scenario())


def test_a_server_that_stops_does_not_wait_for_watchers() -> None:
    """Catches a shutdown that takes its whole grace because somebody watches."""

    async def scenario() -> None:
        async with really_serving(grace=30.0) as served:
            call = served.stub.Watch(pb.WatchRequest())
            await call.read()
            stopping = asyncio.create_task(served.server.stop())
            error = await failure_of(call)
            assert error.reason is Reason.SHUTTING_DOWN
            await asyncio.wait_for(stopping, 15)

    run(scenario())


def test_a_watch_that_is_cancelled_leaves_no_watcher() -> None:
    """Catches watchers that pile up in the engine as clients come and go."""

    async def scenario() -> None:
        async with really_serving() as served:
            for _ in range(3):
                call = served.stub.Watch(pb.WatchRequest())
                await call.read()
                call.cancel()
            hub = served.core._store.hub
            while hub.watchers:
                await served.engine.view()

    run(scenario())
