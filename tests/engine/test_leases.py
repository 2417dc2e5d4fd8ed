"""Leases in an engine: what is granted, what ends by time alone, and who gives way."""

from collections.abc import Callable

import pytest
from bench import PINNED, TENANT, Bench, numbers
from fakes import continuation

from agentkv.config import LeaseConfig
from agentkv.core.lease import DEFAULT_TERMS, LeaseMode, LeaseReduction, LeaseTerms
from agentkv.core.views import Residency
from agentkv.errors import AgentKVError, InvalidRequest, NotFound, PoolExhausted, Reason


def update(bench: Bench, context: str, mode: LeaseMode | None = None, **terms: object) -> None:
    """Asks for a lease."""
    bench.engine.contexts.update_lease(TENANT, context, LeaseTerms(mode, **terms))  # type: ignore[arg-type]  # the terms of each test
    bench.audit()


def wait(bench: Bench, seconds: float) -> None:
    """Lets time pass."""
    bench.now += seconds
    bench.engine.advance()
    bench.audit()


def test_a_lease_expires_and_its_tokens_stay() -> None:
    """Catches an expiry that fails the next call, loses tokens, or never happens."""
    bench = Bench(num_blocks=8)
    prompt = numbers(1, 40)
    context = bench.create(prompt)
    update(bench, context, LeaseMode.PIN, ttl=60.0)
    view = bench.view(context)
    assert (view.lease.mode, view.expire_time) == (LeaseMode.PIN, bench.now + 60)
    wait(bench, 59.9)
    assert bench.view(context).pinned
    wait(bench, 0.2)
    view = bench.view(context)
    assert view.lease.is_expired and view.lease.mode is LeaseMode.DROPPABLE
    assert view.expire_time is None
    other = bench.create(numbers(2, 128))
    assert bench.view(context).residency is Residency.NONE
    bench.release(other)
    assert bench.generate(context, 3) == continuation(prompt, 3)
    lease = bench.view(context).lease
    assert (lease.mode, lease.is_expired, lease.ttl) == (LeaseMode.RETAIN, False, 3600.0)
    bench.end()


def test_any_use_renews_and_looking_does_not() -> None:
    """Catches a keep-alive that is not heard, or an observer that keeps KV alive."""
    bench = Bench(leases=LeaseConfig(default_ttl=100.0))
    context = bench.create(numbers(1, 20))
    uses: list[Callable[[], object]] = [
        lambda: bench.extend(context, [1]),
        lambda: bench.generate(context, 1),
        lambda: bench.fork(context),
        lambda: bench.score(context, [[1]]),
        lambda: bench.truncate(context, 10),
        lambda: update(bench, context),
    ]
    for use in uses:
        wait(bench, 90)
        use()
        assert bench.view(context).expire_time == bench.now + 100
    wait(bench, 90)
    bench.view(context)
    bench.engine.observer.list(TENANT)
    wait(bench, 20)
    assert bench.view(context).lease.is_expired


def test_a_running_generate_keeps_its_lease_alive() -> None:
    """Catches a context that expires under a request that runs on it."""
    bench = Bench(leases=LeaseConfig(default_ttl=10.0, handle_retention=20.0))
    context = bench.create(numbers(1, 20))
    stream = bench.start(context, 30)
    for _ in range(25):
        bench.step()
        wait(bench, 5)
    assert not bench.view(context).lease.is_expired
    bench.finish(stream)
    assert bench.length(context) == 50
    wait(bench, 25)
    with pytest.raises(NotFound):
        bench.view(context)


def test_nobody_uses_a_context_and_it_is_released() -> None:
    """Catches handles that live for ever, or children that die with their parent."""
    bench = Bench(leases=LeaseConfig(handle_retention=1000.0, default_ttl=500.0))
    prompt = numbers(1, 40)
    parent = bench.create(prompt)
    (child,) = bench.fork(parent)
    wait(bench, 900)
    update(bench, child)
    wait(bench, 200)
    with pytest.raises(NotFound):
        bench.view(parent)
    assert bench.generate(child, 3) == continuation(prompt, 3)
    wait(bench, 1001)
    assert bench.live == 0
    bench.end()


def test_pins_beyond_the_quota_are_refused_with_numbers() -> None:
    """Catches a pin that goes past the quota, or a refusal that changes something."""
    bench = Bench(num_blocks=10, leases=LeaseConfig(pin_quota=0.5))
    first, second = bench.create(numbers(1, 64), pinned=True), bench.create(numbers(2, 32))
    before = bench.view(second)
    with pytest.raises(PoolExhausted) as refusal:
        update(bench, second, LeaseMode.PIN)
    metadata = refusal.value.metadata
    assert refusal.value.reason is Reason.TENANT_QUOTA
    assert [metadata[name] for name in ("quota", "need", "limit", "free")] == [
        "pins",
        "6",
        "5",
        "4",
    ]
    assert bench.view(second) == before
    with pytest.raises(PoolExhausted):
        bench.engine.contexts.create(TENANT, numbers(3, 32), lease=PINNED)
    with pytest.raises(PoolExhausted):
        bench.extend(first, numbers(4, 17))
    assert bench.length(first) == 64
    with pytest.raises(PoolExhausted):
        bench.engine.contexts.fork(TENANT, second, lease=PINNED)
    assert len(bench.engine.observer.list(TENANT).contexts) == 2
    update(bench, second, LeaseMode.PIN, may_reduce=True)
    lease = bench.view(second).lease
    assert (lease.mode, lease.reductions) == (LeaseMode.RETAIN, (LeaseReduction.PIN_QUOTA,))
    bench.end()


def test_branches_of_a_pin_share_its_quota() -> None:
    """Catches shared blocks counted once for each branch that pins them."""
    bench = Bench(num_blocks=10, leases=LeaseConfig(pin_quota=0.5))
    root = bench.create(numbers(1, 64), pinned=True)
    branches = bench.fork(root, 20)
    assert all(bench.view(branch).pinned for branch in branches)
    bench.extend(branches[0], [1])
    with pytest.raises(PoolExhausted):
        bench.extend(branches[1], [2])
    bench.end()


def test_a_pin_that_outgrows_the_quota_is_retained() -> None:
    """Catches a generation that pins the pool block by block."""
    bench = Bench(num_blocks=10, block_size=4, leases=LeaseConfig(pin_quota=0.5))
    prompt = numbers(1, 14)
    context = bench.create(prompt, pinned=True)
    assert bench.generate(context, 16) == continuation(prompt, 16)
    lease = bench.view(context).lease
    assert (lease.mode, lease.reductions) == (LeaseMode.RETAIN, (LeaseReduction.PIN_QUOTA,))
    assert bench.pool_view.pinned == 0
    bench.end()


def test_a_subtree_is_pinned_as_a_whole_or_not() -> None:
    """Catches half a subtree that is pinned when the quota ends in the middle."""
    bench = Bench(num_blocks=12, block_size=4, leases=LeaseConfig(pin_quota=0.5))
    root = bench.create(numbers(1, 16))
    branches = bench.fork(root, 3)
    for number, branch in enumerate(branches):
        bench.extend(branch, numbers(number + 5, 4))
    with pytest.raises(PoolExhausted):
        bench.engine.contexts.update_lease(TENANT, root, PINNED, recursive=True)
    assert bench.pool_view.pinned == 0
    bench.release(branches[0])
    leased = bench.engine.contexts.update_lease(TENANT, root, PINNED, recursive=True)
    assert (leased.num_updated, leased.pool.pinned) == (3, 6)
    bench.end()


@pytest.mark.parametrize("ttl", [0.0, -1.0, float("nan"), float("inf"), 86_400.5])
def test_a_time_that_no_lease_can_have_is_refused(ttl: float) -> None:
    """Catches a lease that never ends, one that has ended before, or a half-done call."""
    bench = Bench()
    context = bench.create(numbers(1, 20))
    before = bench.view(context)
    bench.now += 5
    terms = LeaseTerms(LeaseMode.PIN, ttl)
    calls: list[Callable[[], object]] = [
        lambda: bench.engine.contexts.update_lease(TENANT, context, terms),
        lambda: bench.engine.contexts.create(TENANT, [1], lease=terms),
        lambda: bench.engine.contexts.fork(TENANT, context, lease=terms),
    ]
    for call in calls:
        with pytest.raises(InvalidRequest) as refusal:
            call()
        assert "lease.ttl" in refusal.value.violations
    assert bench.view(context) == before
    assert len(bench.engine.observer.list(TENANT).contexts) == 1


def test_a_longer_time_is_reduced_where_that_is_fine() -> None:
    """Catches a reduction that is not told."""
    bench = Bench()
    context = bench.create(numbers(1, 20))
    update(bench, context, ttl=1e9, may_reduce=True)
    lease = bench.view(context).lease
    assert (lease.ttl, lease.reductions) == (86_400.0, (LeaseReduction.MAX_TTL,))


def test_who_gives_way_first() -> None:
    """Catches retained KV taken while parked or droppable KV is there, whoever was used last."""
    bench = Bench(num_blocks=8)
    retained, parked, dropped = (bench.create(numbers(number, 32)) for number in range(3))
    update(bench, parked, LeaseMode.PARK)
    update(bench, dropped, LeaseMode.DROPPABLE)
    order = []
    for number in range(4):
        bench.create(numbers(10 + number, 32), pinned=True)
        gone = {
            name
            for name, context in (("retained", retained), ("parked", parked), ("dropped", dropped))
            if bench.view(context).residency is not Residency.DEVICE
        }
        order.append(gone)
    assert order == [
        set(),
        {"dropped"},
        {"dropped", "parked"},
        {"dropped", "parked", "retained"},
    ]


def test_a_parked_context_comes_back_by_use() -> None:
    """Catches a context that is parked again after every call of the turn that follows."""
    bench = Bench(num_blocks=4)
    prompt = numbers(1, 32)
    context = bench.create(prompt)
    update(bench, context, LeaseMode.PARK, ttl=50.0)
    update(bench, context)
    assert bench.view(context).lease.mode is LeaseMode.PARK, "a sign of life ended the pause"
    (branch,) = bench.fork(context)
    assert bench.view(branch).lease.mode is LeaseMode.RETAIN
    assert bench.view(context).lease.mode is LeaseMode.PARK
    bench.create(numbers(2, 40))
    assert bench.view(context).residency is not Residency.DEVICE
    assert bench.generate(context, 2) == continuation(prompt, 2)
    lease = bench.view(context).lease
    assert (lease.mode, lease.ttl) == (LeaseMode.RETAIN, 50.0)
    bench.end()


def test_what_a_release_would_free() -> None:
    """Catches blocks counted as reclaimable that a request or a pin holds."""
    bench = Bench()
    context = bench.create(numbers(1, 40))
    (branch,) = bench.fork(context)
    bench.extend(branch, numbers(2, 20))
    view = bench.view(branch)
    assert (view.private_blocks, view.shared_blocks, view.reclaimable_blocks) == (2, 2, 4)
    update(bench, context, LeaseMode.PIN)
    assert bench.view(branch).reclaimable_blocks == 2
    assert bench.view(context).reclaimable_blocks == 0
    pool = bench.pool_view
    assert pool.reclaimable == pool.total - pool.free - 3


@pytest.mark.parametrize("request_id", [None, "r"])
def test_a_create_whose_caller_went_away(request_id: str | None) -> None:
    """Catches a context that nobody has a handle of, and that stays for a day."""
    bench = Bench()
    prompt = numbers(1, 20)
    operation = bench.run(bench.engine.contexts.create(TENANT, prompt, request_id=request_id))
    context = operation.answer.context.id
    bench.engine.disown(operation)
    if request_id is None:
        with pytest.raises(NotFound):
            bench.view(context)
        return
    wait(bench, 599)
    again = bench.engine.contexts.create(TENANT, prompt, request_id=request_id)
    assert again.answer.context.id == context
    wait(bench, 601)
    assert bench.view(context).length == 20
    bench.engine.disown(operation)
    wait(bench, 601)
    with pytest.raises(NotFound):
        bench.view(context)


def test_time_is_looked_at_no_more_often_than_needed() -> None:
    """Catches a note of each use that stays until its time: memory that grows with calls."""
    bench = Bench()
    context = bench.create(numbers(1, 20))
    for _ in range(1000):
        bench.now += 0.1
        update(bench, context, ttl=3000.0)
        bench.engine.advance()
    assert len(bench.engine._leases._due) <= 3
    assert bench.engine.idle_time is not None and bench.engine.idle_time > 0


def test_an_unknown_handle_has_no_lease() -> None:
    """Catches another tenant's lease that can be seen or changed."""
    bench = Bench()
    context = bench.create(numbers(1, 20))
    for tenant, name in (("other", context), (TENANT, "none")):
        with pytest.raises(AgentKVError) as refusal:
            bench.engine.contexts.update_lease(tenant, name, DEFAULT_TERMS)
        assert refusal.value.reason is Reason.CONTEXT_NOT_FOUND
