"""Thousands of agents at random on a pool far too small: everybody ends, nobody waits for ever."""

import random
from collections.abc import Iterator

import pytest
from bench import PARK
from fakes import FakeModelRunner, make_engine

from agentkv.config import SchedulerConfig
from agentkv.engine.engine import Engine
from agentkv.engine.operations import Operation
from agentkv.errors import PoolExhausted
from agentkv.sampling_params import SamplingParams

LONGEST_WAIT = 2500
"""Steps within which any call must end. One agent alone needs at most 25 for one."""


class HollowRunner(FakeModelRunner):
    """Reads nothing: thousands of agents are to be simulated, and what is read others test."""

    def _read(self, batch: object) -> list[int]:
        return list(range(len(self.batches[-1].token_ids)))


def agent(engine: Engine, dice: random.Random, tenant: str) -> Iterator[Operation | int]:
    """Lives: yields the call it waits for, or how many steps its tool takes."""
    prompt = [dice.randrange(1000) for _ in range(dice.randint(1, 60))]
    create = engine.contexts.create(tenant, prompt)
    yield create
    mine = [create.answer.context.id]
    for _ in range(dice.randint(1, 5)):
        context = dice.choice(mine)
        verb = dice.choice(("fork", "extend", "generate", "generate", "park", "release"))
        length = engine.observer.get(tenant, context).length
        if verb == "fork" and len(mine) < 4:
            at = dice.choice((None, dice.randint(1, length)))
            mine += [view.id for view in engine.contexts.fork(tenant, context, count=2, at=at)]
        elif verb == "extend" and length < 100:
            yield engine.contexts.extend(tenant, context, [dice.randrange(1000) for _ in range(9)])
        elif verb == "generate" and length < 100:
            yield engine.inference.generate(
                tenant, context, SamplingParams(max_tokens=dice.randint(1, 12))
            )
        elif verb == "park":
            engine.contexts.update_lease(tenant, context, PARK)
            yield dice.randint(1, 40)
        elif verb == "release" and len(mine) > 1:
            mine.remove(context)
            engine.contexts.release(tenant, [context])
        yield dice.randint(0, 5)
    engine.contexts.release(tenant, mine)


@pytest.mark.slow
@pytest.mark.parametrize(("host_blocks", "disk_blocks"), [(0, 0), (30, 0), (12, 40)])
def test_every_agent_ends(host_blocks: int, disk_blocks: int) -> None:
    """Catches deadlock, livelock and starvation, with and without tiers below the pool.

    120 agents at a time on blocks for seven of their longest contexts, 1,000 in all. No call may
    be refused: each fits into the pool alone.
    """
    runner = HollowRunner(64, 8)
    engine = make_engine(
        runner,
        num_blocks=64,
        block_size=8,
        host_blocks=host_blocks,
        disk_blocks=disk_blocks,
        scheduler=SchedulerConfig(token_budget=64, chunk_size=32, max_running=24),
    )
    dice, disk = random.Random(host_blocks), random.Random(3)
    runner.reads_at_once = lambda place: disk.random() < 0.3
    starting = [agent(engine, dice, f"tenant{n % 5}") for n in range(1000)]
    waiting: dict[Iterator[Operation | int], tuple[Operation | int, int]] = {}
    now = 0
    while starting or waiting:
        while starting and len(waiting) < 120:
            waiting[starting.pop()] = (0, now)
        for life, (awaited, since) in list(waiting.items()):
            if isinstance(awaited, Operation):
                assert now - since < LONGEST_WAIT, "a call waits for ever"
                assert not isinstance(awaited.error, PoolExhausted)
                is_over = awaited.is_done
            else:
                is_over = now - since >= awaited
            if is_over:
                following = next(life, None)
                del waiting[life]
                if following is not None:
                    waiting[life] = (following, now)
        engine.step()
        runner.batches.clear()
        runner.moves.clear()
        now += 1
        if now % 500 == 0:
            engine.check()
    assert len(engine._store) == 0
    engine.flush_cache()
    engine.check()
    pool = engine.observer.pool()
    assert pool.free == pool.total and pool.host.free == pool.host.total
    assert (engine.view().num_brought_back > 0) == (host_blocks > 0)
