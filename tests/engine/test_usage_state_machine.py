"""Bills against a brute-force integrator: each block's second split by hand, program by program.

The integrator knows no meter and no segment but by its lists of blocks: whenever time moves, it
looks up which contexts hold each taken block of each tier and adds each one's part. Programs fork,
extend, generate, score, truncate, park, release and evict in pools so small that contexts give way,
and that host blocks fall to disk.
"""

from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import astuple

import pytest
from bench import PARK, PINNED, RETAINED, TENANT, Bench
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from agentkv.core.block_move import Place, Tier
from agentkv.core.context import Context
from agentkv.core.segment import Hold
from agentkv.core.usage_view import UsageView
from agentkv.errors import AgentKVError
from agentkv.sampling_params import SamplingParams

TENANTS = (TENANT, "other")
picks = st.integers(0, 10_000)
some_steps = st.sampled_from([0, 1, 2, 6])
few_tokens = st.lists(st.integers(0, 2), min_size=1, max_size=12)


class UsageMachine(RuleBasedStateMachine):
    """Rules are the verbs; time moves between them, by anything from nothing to hours."""

    bench: Bench

    def __init__(self) -> None:
        super().__init__()
        self.ids: dict[str, str] = {}
        """Living contexts, and their tenants."""
        self.used: defaultdict[tuple[str, Tier], float] = defaultdict(float)
        """Block-seconds by context, by tree and by tenant, released contexts' too."""
        self.saved: defaultdict[str, float] = defaultdict(float)
        self.owners: dict[str, str] = {}
        """Tenants of trees."""
        self.pool = dict.fromkeys(Tier, 0.0)
        self.taken = dict.fromkeys(Tier, 0.0)

    @initialize(
        block_size=st.sampled_from([1, 2, 4]),
        num_blocks=st.sampled_from([8, 14, 40]),
        lower=st.sampled_from([(0, 0), (3, 0), (4, 5), (30, 0), (12, 40)]),
    )
    def start(self, block_size: int, num_blocks: int, lower: tuple[int, int]) -> None:
        host_blocks, disk_blocks = lower
        self.bench = Bench(
            num_blocks,
            block_size,
            host_blocks=host_blocks,
            disk_blocks=disk_blocks,
            chunk=5,
            budget=12,
            max_length=40,
        )
        self.bench.runner.before_step = lambda batch: self.wait(0.25)  # a step takes time too

    # -- verbs -------------------------------------------------------------------------------

    @rule(
        tokens=few_tokens,
        tenant=st.sampled_from(TENANTS),
        pinned=st.sampled_from([False] * 5 + [True]),
        then=some_steps,
    )
    def create(self, tokens: list[int], tenant: str, pinned: bool, then: int) -> None:
        try:
            operation = self.bench.engine.contexts.create(
                tenant, tokens, lease=PINNED if pinned else RETAINED
            )
        except AgentKVError:
            return
        context_id = operation.requests[0].context.id
        self.ids[context_id] = tenant
        self.step(then)

    @precondition(lambda self: self.ids)
    @rule(pick=picks, at=st.none() | picks, count=st.integers(1, 3))
    def fork(self, pick: int, at: int | None, count: int) -> None:
        context_id = self._pick(pick)
        tenant = self.ids[context_id]
        length = self.bench.engine.observer.get(tenant, context_id).length
        position = None if at is None else at % (length + 1)
        for view in self.bench.engine.contexts.fork(tenant, context_id, count=count, at=position):
            self.ids[view.id] = tenant

    @precondition(lambda self: self.ids)
    @rule(pick=picks, tokens=few_tokens, then=some_steps)
    def extend(self, pick: int, tokens: list[int], then: int) -> None:
        context_id = self._pick(pick)
        self._try(
            lambda: self.bench.engine.contexts.extend(self.ids[context_id], context_id, tokens)
        )
        self.step(then)

    @precondition(lambda self: self.ids)
    @rule(pick=picks, max_tokens=st.integers(1, 9), then=some_steps)
    def generate(self, pick: int, max_tokens: int, then: int) -> None:
        context_id, params = self._pick(pick), SamplingParams(max_tokens=max_tokens)
        self._try(
            lambda: self.bench.engine.inference.generate(self.ids[context_id], context_id, params)
        )
        self.step(then)

    @precondition(lambda self: self.ids)
    @rule(pick=picks, continuations=st.lists(few_tokens, min_size=1, max_size=3), then=some_steps)
    def score(self, pick: int, continuations: list[list[int]], then: int) -> None:
        context_id = self._pick(pick)
        self._try(
            lambda: self.bench.engine.inference.score(
                self.ids[context_id], context_id, continuations
            )
        )
        self.step(then)

    @precondition(lambda self: self.ids)
    @rule(pick=picks, length=picks)
    def truncate(self, pick: int, length: int) -> None:
        context_id = self._pick(pick)
        tenant = self.ids[context_id]
        length %= self.bench.engine.observer.get(tenant, context_id).length + 1
        self._try(lambda: self.bench.engine.contexts.truncate(tenant, context_id, length))

    @precondition(lambda self: self.ids)
    @rule(pick=picks, then=some_steps)
    def park(self, pick: int, then: int) -> None:
        context_id = self._pick(pick)
        self._try(
            lambda: self.bench.engine.contexts.update_lease(self.ids[context_id], context_id, PARK)
        )
        self.step(then)

    @precondition(lambda self: self.ids)
    @rule(pick=picks)
    def release(self, pick: int) -> None:
        context_id = self._pick(pick)
        self.bench.engine.contexts.release(self.ids.pop(context_id), [context_id])

    @rule()
    def evict(self) -> None:
        self.bench.engine.flush_cache()

    @rule(count=st.integers(1, 6))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.bench.step()

    @rule(seconds=st.sampled_from([0.0, 1e-3, 1.0, 7.5, 1e4]))
    def wait(self, seconds: float) -> None:
        """Moves time on, and integrates by hand what is there meanwhile."""
        holders: defaultdict[Place, list[Context]] = defaultdict(list)
        store = self.bench.engine._store
        for context in (*store, *store.hidden):
            path = self.bench.tree.path(context.tail)
            places = {place for segment in path for place in segment.away}
            if context.hold >= Hold.KV:
                blocks = {block for segment in path for block in segment.blocks}
                places |= {Place(Tier.DEVICE, block_id) for block_id in blocks}
            for place in places:
                holders[place].append(context)
        for tier, pool in {Tier.DEVICE: self.bench.pool, **self.bench.tree.lower.pools}.items():
            taken = pool.num_blocks - pool.num_free
            self.taken[tier] += taken * seconds
            self.pool[tier] += (taken - sum(p.tier is tier for p in holders)) * seconds
        for place, contexts in holders.items():
            for context in contexts:
                payer = context.parent if context in store.hidden else context
                assert payer is not None
                self.owners[f"tree {payer.root_id}"] = payer.tenant
                for name in (f"context {payer.id}", f"tree {payer.root_id}", payer.tenant):
                    self.used[name, place.tier] += seconds / len(contexts)
                    self.saved[name] += seconds * (1 - 1 / len(contexts))
        self.bench.now += seconds

    # -- what must hold ----------------------------------------------------------------------

    @invariant()
    def bills_are_right(self) -> None:
        if not hasattr(self, "bench"):
            return
        engine = self.bench.engine
        living = {context.id for context in engine._store}
        self.ids = {id: tenant for id, tenant in self.ids.items() if id in living}
        for tenant in TENANTS:
            usage = engine.observer.usage(tenant)
            assert usage.num_contexts == sum(owner == tenant for owner in self.ids.values())
            self._compare(usage, tenant)
            for occupancy in engine._tree.residency.occupancies:
                held = occupancy.tenancy(engine._tree.root(tenant))
                expected = self.used[tenant, occupancy.tier]
                assert held.block_seconds == self._near(expected, occupancy.tier)
        for tier, taken, _, unheld in map(astuple, usage.tiers):
            assert taken == self._near(self.taken[tier], tier)
            assert unheld == self._near(self.pool[tier], tier)
            tenants = sum(engine.observer.usage(t).bill.block_seconds[tier] for t in TENANTS)
            assert tenants + unheld == pytest.approx(taken, rel=1e-9)
        assert {view.tier for view in usage.tiers} == {
            Tier.DEVICE,
            *(tier for tier, pool in self.bench.tree.lower.pools.items() if pool.num_blocks),
        }
        for context_id, tenant in self.ids.items():
            self._compare(
                engine.observer.usage(tenant, context_id=context_id), f"context {context_id}"
            )
            root_id = engine.observer.get(tenant, context_id).root_id
            self._compare(engine.observer.usage(tenant, root_id=root_id), f"tree {root_id}")

    def teardown(self) -> None:
        if not hasattr(self, "bench"):
            return
        self.bench.drain()
        self.bills_are_right()
        for context_id, tenant in self.ids.items():
            self.bench.engine.contexts.release(tenant, [context_id])
        trees = list(self.owners)
        self.wait(3.0)
        self.bench.engine.flush_cache()
        self.wait(100.0)
        self.bills_are_right()
        for name in trees:  # what is released stays counted
            tenant = self.owners[name]
            self._compare(self.bench.engine.observer.usage(tenant, root_id=name[5:]), name)
        assert all(occupancy.is_idle for occupancy in self.bench.tree.residency.occupancies)

    # -- inside ------------------------------------------------------------------------------

    def _pick(self, pick: int) -> str:
        return sorted(self.ids)[pick % len(self.ids)]

    def _near(self, value: float, *tiers: Tier) -> object:
        """What equals a sum to 1e-9 of all that was used, which rounding is in proportion to."""
        taken = sum(self.taken[tier] for tier in tiers or Tier)
        return pytest.approx(value, rel=1e-9, abs=1e-9 * taken)

    def _compare(self, usage: UsageView, name: str) -> None:
        for tier in Tier:
            assert usage.bill.block_seconds[tier] == self._near(self.used[name, tier], tier)
        assert usage.bill.saved_block_seconds == self._near(self.saved[name])

    def _try(self, call: Callable[[], object]) -> None:
        with suppress(AgentKVError):
            call()


TestUsageMachine = pytest.mark.slow(UsageMachine.TestCase)
TestUsageMachine.settings = settings(
    max_examples=120,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
    phases=(Phase.generate, Phase.shrink),
)
