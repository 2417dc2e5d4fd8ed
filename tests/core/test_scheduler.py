"""One step after the other, without an engine: what update and roll_back do."""

import itertools

import pytest
from fakes import FakeModelRunner, continuation

from agentkv.config import LimitsConfig, SchedulerConfig
from agentkv.core.block_pool import BlockPool
from agentkv.core.context import Context
from agentkv.core.context_store import ContextStore
from agentkv.core.context_tree import ContextTree
from agentkv.core.lease import Lease, LeaseMode
from agentkv.core.request import Event, FinishReason, Request, RequestStatus
from agentkv.core.scheduler import Scheduler
from agentkv.core.segment import Hold
from agentkv.errors import PoolExhausted, Reason
from agentkv.sampling_params import SamplingParams

RETAINED = Lease(LeaseMode.RETAIN, 3600.0)


class Setup:
    """A scheduler on a fake model."""

    def __init__(self, num_blocks: int = 32, **options: int) -> None:
        tree = ContextTree(BlockPool(num_blocks), block_size=4)
        names = itertools.count()
        self.store = ContextStore(tree, LimitsConfig(), lambda: f"c{next(names)}")
        self.scheduler = Scheduler(self.store, SchedulerConfig(**options), max_length=40)
        self.runner = FakeModelRunner(num_blocks, 4)
        self.runner.pool = tree.pool
        self.tree = tree
        self.ids = itertools.count(1)

    def create(self, tokens: list[int]) -> Request:
        """Queues a create."""
        context = self.store.create("t", tokens, lease=RETAINED, labels={}, now=0)
        return self.submit(Request(next(self.ids), context))

    def generate(self, context: Context, max_tokens: int) -> Request:
        """Queues a generate."""
        params = SamplingParams(max_tokens=max_tokens)
        return self.submit(Request(next(self.ids), context, params))

    def submit(self, request: Request) -> Request:
        """Queues a request."""
        self.scheduler.require_possible([request])
        self.scheduler.submit([request])
        return request

    def step(self) -> list[Event]:
        """Runs one step."""
        step = self.scheduler.schedule()
        assert step is not None
        events = [*step.refused]
        if step.works:
            events += self.scheduler.update(step, self.runner.run(step.batch))
        self.store.check()
        return events


def test_a_create_then_a_generate() -> None:
    """Catches a request that ends too early, too late, or in the wrong state."""
    setup = Setup()
    create = setup.create([1, 2, 3, 4, 5])
    assert create.context.length == 0
    assert setup.step() == [Event(create, finish=FinishReason.LENGTH)]
    assert create.status is RequestStatus.DONE and create.context.length == 5
    generate = setup.generate(create.context, 2)
    expected = continuation([1, 2, 3, 4, 5], 2)
    assert setup.step() == [Event(generate, expected[0])]
    assert setup.step() == [Event(generate, expected[1], finish=FinishReason.LENGTH)]
    assert not setup.scheduler.has_work and setup.scheduler.schedule() is None
    statistics = setup.scheduler.statistics()
    assert (statistics.num_steps, statistics.computed_tokens) == (3, 6)


def test_nothing_to_do() -> None:
    """Catches an empty step."""
    assert Setup().scheduler.schedule() is None


def test_roll_back_gives_everything_back() -> None:
    """Catches blocks, holds or a guard left behind by a step that raised."""
    setup = Setup()
    parent = setup.create(list(range(10)))
    setup.step()
    (child,) = setup.store.fork(
        parent.context, count=1, at=None, lease=parent.context.lease, labels={}, now=0
    )
    before = setup.tree.pool.num_free
    child.tail = setup.tree.append(child.tail, [7], child.hold)
    extend = setup.submit(Request(next(setup.ids), child))
    fresh = setup.create([50] * 9)
    step = setup.scheduler.schedule()
    assert step is not None and step.batch.copies
    events = setup.scheduler.roll_back(step)
    setup.store.check()
    assert {event.request for event in events} == {extend, fresh}
    assert {event.error.reason for event in events if event.error} == {Reason.ENGINE_STEP_FAILED}
    assert child.length == child.tail.end == 10
    setup.store.release(fresh.context)
    assert setup.tree.pool.num_free == before
    assert setup.tree.residency.held[Hold.FIRM] == 0


def test_longest_context_ends_generation() -> None:
    """Catches a token committed past the model's longest context."""
    setup = Setup()
    create = setup.create([1] * 38)
    setup.step()
    setup.generate(create.context, 10)
    assert [event.finish for _ in range(2) for event in setup.step()] == [None, FinishReason.LENGTH]
    assert create.context.length == 40


def test_queue_is_bounded() -> None:
    """Catches a queue that grows while nobody is served."""
    setup = Setup(max_waiting=1)
    setup.create([1])
    with pytest.raises(PoolExhausted) as refusal:
        setup.create([2])
    assert refusal.value.reason is Reason.QUEUE_FULL
    assert refusal.value.metadata == {"waiting": "1", "need": "1", "limit": "1"}
    assert refusal.value.retry_after is not None


def test_finish_of_a_waiting_and_of_a_running_request() -> None:
    """Catches a request left in a queue after its end."""
    setup = Setup(chunk_size=2, max_running=1)
    first, second = setup.create([1] * 6), setup.create([2] * 6)
    setup.step()
    assert (first.status, second.status) == (RequestStatus.RUNNING, RequestStatus.WAITING)
    for request in (second, first):
        setup.scheduler.finish(request)
        assert request.status is RequestStatus.DONE
        assert request.context.request is None
        setup.store.check()
    assert not setup.scheduler.has_work
    assert setup.tree.residency.held[Hold.FIRM] == 0
