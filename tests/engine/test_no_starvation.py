"""Thousands of random agents in simulated time: every call ends, and every token is right.

Agents of several tenants create, fork, grow, generate, park during tools, pin, forget their
contexts and come back, on a pool that holds a small part of what they want. A step is a second.
"""

import random
from collections.abc import Callable, Generator
from typing import TypeVar

import pytest
from bench import Bench, numbers
from fakes import continuation

from agentkv.config import LeaseConfig
from agentkv.core.lease import LeaseMode, LeaseTerms
from agentkv.engine.operations import Operation
from agentkv.errors import NotFound, PoolExhausted
from agentkv.sampling_params import SamplingParams

OperationT = TypeVar("OperationT", bound=Operation)

NUM_AGENTS = 2000
NUM_TENANTS = 5
AT_ONCE = 30
PATIENCE = 3000
"""Steps that no call may take: some ten times what all calls under way need one by one."""


class Agent:
    """One agent: a program that yields what it waits for, an operation or a number of seconds."""

    def __init__(self, bench: Bench, number: int) -> None:
        self.bench = bench
        self.number = number
        self.tenant = f"t{number % NUM_TENANTS if number % 3 else 0}"  # one has far more
        self.draw = random.Random(number)
        self.refusals: list[PoolExhausted] = []
        self.waits_for: Operation | None = None
        self.since = 0.0
        self.wakes_at = 0.0
        self.program = self._run()

    def is_ready(self) -> bool:
        """Whether what it waits for has come."""
        operation = self.waits_for
        assert operation is None or self.bench.now - self.since < PATIENCE, "a call is starved"
        return self.bench.now >= self.wakes_at and (operation is None or operation.is_done)

    def _run(self) -> Generator[Operation | float, None, None]:
        engine, draw = self.bench.engine, self.draw
        tokens = numbers(self.number, draw.randrange(1, 40))
        create = yield from self._try(lambda: engine.contexts.create(self.tenant, tokens))
        if create is None:
            return
        context = create.answer.context.id
        for turn in range(draw.randrange(1, 4)):
            given = numbers(self.number + turn + 1, draw.randrange(1, 12))
            if (yield from self._try(self._extend(context, given))) is None:
                break
            tokens = tokens + given
            count = draw.randrange(1, 10)
            if (yield from self._try(self._generate(context, count))) is None:
                break
            tokens = tokens + continuation(tokens, count)
            mode = draw.choice(list(LeaseMode))
            terms = LeaseTerms(mode, draw.choice([None, 5.0, 50.0]), may_reduce=True)
            engine.contexts.update_lease(self.tenant, context, terms)
            if draw.random() < 0.3:
                engine.contexts.fork(self.tenant, context, count=draw.randrange(1, 4))
            yield draw.choice([0.0, 3.0, 30.0])
        assert list(engine.observer.tokens(self.tenant, context))[: len(tokens)] == tokens
        if draw.random() < 0.7:  # the others leave it to the handle retention
            engine.contexts.release(self.tenant, [context], recursive=True)

    def _extend(self, context: str, given: list[int]) -> Callable[[], Operation]:
        return lambda: self.bench.engine.contexts.extend(self.tenant, context, given)

    def _generate(self, context: str, count: int) -> Callable[[], Operation]:
        params = SamplingParams(max_tokens=count)
        return lambda: self.bench.engine.inference.generate(self.tenant, context, params)

    def _try(
        self, begin: Callable[[], OperationT]
    ) -> Generator[Operation, None, OperationT | None]:
        """Begins an operation and waits for it; None where it was refused with numbers."""
        try:
            operation = begin()
            yield operation
            if operation.error is None:
                return operation
            raise operation.error
        except PoolExhausted as error:
            self.refusals.append(error)
            return None


@pytest.mark.slow
def test_random_agents_are_never_starved() -> None:
    """Catches a deadlock, a livelock, a starved tenant, and a token that pressure has changed."""
    bench = Bench(
        num_blocks=40,
        block_size=4,
        budget=64,
        chunk=16,
        max_running=16,
        watermark=2,
        leases=LeaseConfig(pin_quota=0.1, default_ttl=40.0, handle_retention=200.0),
    )
    waiting = [Agent(bench, number) for number in range(NUM_AGENTS)]
    everybody = list(waiting)
    active: list[Agent] = []
    num_steps = 0
    while waiting or active:
        while waiting and len(active) < AT_ONCE:
            active.append(waiting.pop())
        for agent in [agent for agent in active if agent.is_ready()]:
            agent.waits_for = None
            for wanted in agent.program:
                agent.since = bench.now
                if isinstance(wanted, Operation):
                    agent.waits_for = wanted
                else:
                    agent.wakes_at = bench.now + wanted
                break
            else:
                active.remove(agent)
        bench.now += 1
        bench.engine.advance()
        bench.engine.step()
        num_steps += 1
        if num_steps % 500 == 0:
            bench.audit()
    refusals = [refusal for agent in everybody for refusal in agent.refusals]
    assert len(refusals) < NUM_AGENTS // 10
    assert all({"need", "free"} <= refusal.metadata.keys() for refusal in refusals)
    assert bench.engine.view().num_preemptions > 100
    bench.now += 1000
    bench.engine.advance()
    for agent in everybody:
        assert not bench.engine.observer.list(agent.tenant).contexts
    bench.engine.flush_cache()
    assert bench.free == bench.pool_view.total


def test_an_agent_that_was_away_too_long_is_told_so() -> None:
    """Catches a handle that is gone after its retention, and answers as if it were not."""
    bench = Bench(leases=LeaseConfig(handle_retention=10.0, default_ttl=5.0))
    context = bench.create(numbers(1, 10))
    bench.now += 11
    bench.engine.advance()
    with pytest.raises(NotFound):
        bench.engine.contexts.extend("tenant", context, [1])
