"""A call that is refused leaves its context's lease as it was, however late the refusal comes."""

from collections.abc import Callable

import pytest
from bench import PARK, PINNED, TENANT, Bench, numbers
from fakes import continuation

from agentkv.config import LeaseConfig
from agentkv.core.lease import LeaseMode
from agentkv.core.views import Residency
from agentkv.core.watch import Change
from agentkv.errors import AgentKVError, Reason
from agentkv.sampling_params import SamplingParams

PROMPT = numbers(1, 32)
Call = Callable[[Bench, str], object]

CALLS: dict[str, Call] = {
    "generate": lambda bench, id: bench.engine.inference.generate(TENANT, id, SamplingParams()),
    "generate_branches": lambda bench, id: bench.engine.inference.generate_branches(
        TENANT, id, 2, SamplingParams()
    ),
    "score": lambda bench, id: bench.engine.inference.score(TENANT, id, [[1], [2]]),
    "extend": lambda bench, id: bench.engine.contexts.extend(TENANT, id, [1]),
}
by_call = pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)


def refused(bench: Bench, context: str, call: Call) -> AgentKVError:
    """Makes a call a while after the last use; it must be refused, and leave nothing to be seen."""
    watcher = bench.engine.observer.watch(TENANT)
    while watcher.has_more:
        watcher.take_news()
    bench.now += 5

    def state() -> object:
        return bench.engine.observer.list(TENANT).contexts, bench.engine.view()

    before = state()
    with pytest.raises(AgentKVError) as refusal:
        call(bench, context)
    bench.audit()
    assert state() == before
    changes = [change for change in watcher.take_news() if isinstance(change, Change)]
    assert all(change.context_id != context for change in changes)
    return refusal.value


@by_call
def test_a_full_queue_leaves_a_parked_context_parked(call: Call) -> None:
    """Catches a pause ended, and KV kept on the device, by a call that never got in."""
    bench = Bench(num_blocks=8, host_blocks=8, max_waiting=1)
    context, other = bench.create(PROMPT), bench.create(numbers(2, 20))
    stream = bench.start(other, 1)
    bench.engine.contexts.update_lease(TENANT, context, PARK)
    assert refused(bench, context, call).reason is Reason.QUEUE_FULL
    bench.finish(stream)
    view = bench.view(context)
    assert (view.lease.mode, view.residency) == (LeaseMode.PARK, Residency.HOST)
    assert bench.generate(context, 3) == continuation(PROMPT, 3)
    assert bench.view(context).lease.mode is LeaseMode.RETAIN
    bench.end()


@by_call
def test_a_full_pool_leaves_a_parked_context_parked(call: Call) -> None:
    """Catches KV that counts as live on the device again, though nothing may bring it back."""
    bench = Bench(num_blocks=6, host_blocks=8)
    context = bench.create(PROMPT)
    assert bench.park(context).residency is Residency.HOST
    pinned = bench.create(numbers(2, 75), pinned=True)
    assert refused(bench, context, call).reason is Reason.KV_BLOCKS_EXHAUSTED
    assert bench.view(context).lease.mode is LeaseMode.PARK
    bench.release(pinned)
    assert bench.generate(context, 3) == continuation(PROMPT, 3)
    bench.end()


@by_call
def test_a_lease_that_expired_is_not_renewed(call: Call) -> None:
    """Catches KV that gave way to nobody because of calls that were all refused."""
    bench = Bench(num_blocks=8, max_waiting=1, leases=LeaseConfig(default_ttl=10.0))
    context, other = bench.create(PROMPT), bench.create(numbers(2, 20))
    bench.now += 11
    bench.engine.advance()
    stream = bench.start(other, 1)
    refused(bench, context, call)
    assert bench.view(context).lease.is_expired
    bench.finish(stream)
    bench.end()


def test_a_refused_pin_leaves_a_parked_context_parked() -> None:
    """Catches a parked context that is kept from leaving the device by a pin it did not get."""
    bench = Bench(num_blocks=10, host_blocks=8, leases=LeaseConfig(pin_quota=0.5))
    bench.create(numbers(2, 64), pinned=True)
    context = bench.create(PROMPT)
    bench.engine.contexts.update_lease(TENANT, context, PARK)
    pin = refused(
        bench, context, lambda bench, id: bench.engine.contexts.update_lease(TENANT, id, PINNED)
    )
    assert pin.reason is Reason.TENANT_QUOTA
    bench.step()
    view = bench.view(context)
    assert (view.lease.mode, view.residency) == (LeaseMode.PARK, Residency.HOST)
    bench.end()
