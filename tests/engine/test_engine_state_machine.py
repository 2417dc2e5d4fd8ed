"""All engine operations in any order, against a model of plain lists.

The model knows nothing of blocks: a context is a list of tokens. After each rule the audit
compares bookkeeping with simulated KV, and every context with its list; at the end everything is
released and the pool must be whole. Pools are small, so that cache is evicted, idle contexts
give way, requests are preempted and some are refused.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import pytest
from bench import PARK, PINNED, RETAINED, TENANT, Bench
from fakes import continuation, logprob, mostly_right, next_token
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from agentkv.config import LimitsConfig, QuotaConfig, QuotasConfig
from agentkv.core.block_move import BlockMove
from agentkv.core.request import Request, RequestStatus
from agentkv.core.views import ContextView
from agentkv.engine.operations import Commit, Generation, Operation, Scoring
from agentkv.engine.outputs import Branches, Chunk, Finish
from agentkv.errors import AgentKVError, PoolExhausted, Reason
from agentkv.sampling_params import SamplingParams

MAX_LENGTH = 60
MAX_CONTEXTS = 14
picks = st.integers(0, 10_000)
some_steps = st.sampled_from([0, 0, 1, 2, 5, 30])
few_tokens = st.lists(st.integers(0, 2), min_size=1, max_size=14)


class StepFailed(Exception):
    """A fault of the device."""


@dataclass(eq=False)
class Pending:
    """An operation in progress, and what it will have done."""

    operation: Operation
    ids: list[str]
    """Contexts that it changes; none for Score."""
    tokens: list[int] = field(default_factory=list)
    """Given tokens, committed all at once."""
    base: list[int] = field(default_factory=list)
    """Tokens before those that are scored."""
    continuations: list[list[int]] = field(default_factory=list)
    is_create: bool = False
    num_finished: int = 0


class EngineMachine(RuleBasedStateMachine):
    """Rules are the verbs, at any moment."""

    bench: Bench
    watermark: int

    def __init__(self) -> None:
        super().__init__()
        self.model: dict[str, list[int]] = {}
        self.parents: dict[str, str | None] = {}
        self.pending: list[Pending] = []
        self.fault = ""
        self.fault_in = 0
        self.moves_until_lost = 0

    @initialize(
        block_size=st.sampled_from([1, 2, 4, 8]),
        num_blocks=st.sampled_from([6, 9, 14, 40]),
        chunk=st.sampled_from([3, 8, 64]),
        budget=st.sampled_from([4, 16, 64]),
        watermark=st.sampled_from([0, 0, 1, 3]),
        host_blocks=st.sampled_from([0, 3, 8, 40]),
        disk_blocks=st.sampled_from([0, 0, 4, 30]),
        quota=st.sampled_from([None, None, 4, 8]),
    )
    def start(
        self,
        block_size: int,
        num_blocks: int,
        chunk: int,
        budget: int,
        watermark: int,
        host_blocks: int,
        disk_blocks: int,
        quota: int | None,
    ) -> None:
        self.watermark = watermark
        self.bench = Bench(
            num_blocks,
            block_size,
            host_blocks=host_blocks,
            disk_blocks=disk_blocks if host_blocks else 0,
            chunk=chunk,
            budget=budget,
            watermark=watermark,
            max_length=MAX_LENGTH,
            max_waiting=6,
            draft={4: 0, 16: 3, 64: 6}[budget],
            propose=mostly_right,
            limits=LimitsConfig(max_contexts=MAX_CONTEXTS, max_depth=5),
            quotas=QuotasConfig(default=QuotaConfig(blocks=quota)),
        )
        self.bench.runner.before_step = lambda batch: self._fail("before")
        self.bench.runner.after_writes = lambda batch: self._fail("after")
        self.bench.runner.loses = self._loses
        self.bench.runner.reads_at_once = lambda place: place.block_id % 3 > 0
        self.create(0, 0, [0, 1, 2, 0, 1], pinned=False, then=4)
        self.create(0, 3, [2] * 7, pinned=False, then=4)

    # -- verbs -------------------------------------------------------------------------------

    @rule(
        pick=picks,
        cut=picks,
        tokens=few_tokens,
        pinned=st.sampled_from([False] * 7 + [True]),
        then=some_steps,
    )
    def create(self, pick: int, cut: int, tokens: list[int], pinned: bool, then: int) -> None:
        base = self.model[self._pick(pick)] if self.model else []
        tokens = base[: cut % (len(base) + 1)] + tokens
        with self._unchanged_if_refused():
            lease = PINNED if pinned else RETAINED
            operation = self.bench.engine.contexts.create(TENANT, tokens, lease=lease)
            context_id = operation.requests[0].context.id
            self.model[context_id], self.parents[context_id] = [], None
            self.pending.append(Pending(operation, [context_id], tokens, is_create=True))
        self.step(then)

    @precondition(lambda self: self.model)
    @rule(pick=picks, at=st.none() | picks, count=st.integers(1, 3))
    def fork(self, pick: int, at: int | None, count: int) -> None:
        context_id = self._pick(pick)
        tokens = self.model[context_id]
        position = None if at is None else at % (len(tokens) + 1)
        before = self.bench.pool_view
        with self._unchanged_if_refused(Reason.TENANT_QUOTA):
            views = self.bench.engine.contexts.fork(TENANT, context_id, count=count, at=position)
            for view in views:
                self.model[view.id], self.parents[view.id] = tokens[:position], context_id
        after = self.bench.pool_view
        assert (before.free, before.live, before.pinned) <= (after.free, after.live, after.pinned)
        assert before.free == after.free, "a fork took a block"

    @precondition(lambda self: self.model)
    @rule(pick=picks, tokens=few_tokens, logprobs=st.booleans(), then=some_steps)
    def extend(self, pick: int, tokens: list[int], logprobs: bool, then: int) -> None:
        context_id = self._pick(pick)
        with self._unchanged_if_refused():
            operation = self.bench.engine.contexts.extend(
                TENANT, context_id, tokens, logprobs=logprobs
            )
            base = list(self.model[context_id]) if logprobs else []
            self.pending.append(Pending(operation, [context_id], tokens, base))
        self.step(then)

    @precondition(lambda self: self.model)
    @rule(
        pick=picks,
        max_tokens=st.integers(1, 12),
        seed=st.none() | st.integers(1, 3),
        stop_after=st.none() | st.integers(1, 4),
        then=some_steps,
    )
    def generate(
        self, pick: int, max_tokens: int, seed: int | None, stop_after: int | None, then: int
    ) -> None:
        context_id = self._pick(pick)
        params = self._params(context_id, max_tokens, seed, stop_after)
        with self._unchanged_if_refused():
            operation = self.bench.engine.inference.generate(TENANT, context_id, params)
            self.pending.append(Pending(operation, [context_id]))
        self.step(then)

    @precondition(lambda self: self.model)
    @rule(
        pick=picks,
        count=st.integers(1, 4),
        at=st.none() | picks,
        max_tokens=st.integers(1, 8),
        seed=st.none() | st.just(7),
        then=some_steps,
    )
    def generate_branches(
        self, pick: int, count: int, at: int | None, max_tokens: int, seed: int | None, then: int
    ) -> None:
        context_id = self._pick(pick)
        tokens = self.model[context_id]
        position = None if at is None else at % (len(tokens) + 1)
        params = self._params(context_id, max_tokens, seed, None)
        with self._unchanged_if_refused():
            operation = self.bench.engine.inference.generate_branches(
                TENANT, context_id, count, params, at=position
            )
            ids = [request.context.id for request in operation.requests]
            for child_id in ids:
                self.model[child_id], self.parents[child_id] = tokens[:position], context_id
            self.pending.append(Pending(operation, ids))
        self.step(then)

    @precondition(lambda self: self.model)
    @rule(pick=picks, continuations=st.lists(few_tokens, min_size=1, max_size=3), then=some_steps)
    def score(self, pick: int, continuations: list[list[int]], then: int) -> None:
        context_id = self._pick(pick)
        with self._unchanged_if_refused():
            operation = self.bench.engine.inference.score(TENANT, context_id, continuations)
            base = list(self.model[context_id])
            self.pending.append(Pending(operation, [], base=base, continuations=continuations))
        self.step(then)

    @precondition(lambda self: self.model)
    @rule(pick=picks, length=picks)
    def truncate(self, pick: int, length: int) -> None:
        context_id = self._pick(pick)
        length %= len(self.model[context_id]) + 2
        with self._unchanged_if_refused(Reason.POSITION_OUT_OF_RANGE, Reason.CONTEXT_BUSY):
            view = self.bench.engine.contexts.truncate(TENANT, context_id, length)
            assert view.length == length
            del self.model[context_id][length:]

    @precondition(lambda self: self.model)
    @rule(pick=picks, then=st.sampled_from([0, 1]))
    def park(self, pick: int, then: int) -> None:
        context_id = self._pick(pick)
        before = self.bench.view(context_id)
        with self._unchanged_if_refused(Reason.CONTEXT_BUSY):
            view = self.bench.engine.contexts.update_lease(TENANT, context_id, PARK).context
            assert view.length == before.length
        self.step(then)

    @precondition(lambda self: self.model)
    @rule(pick=picks, other=st.none() | picks, recursive=st.booleans())
    def release(self, pick: int, other: int | None, recursive: bool) -> None:
        ids = {self._pick(pick), self._pick(pick if other is None else other)}
        doomed = set(ids)
        while recursive and (more := {c for c, p in self.parents.items() if p in doomed} - doomed):
            doomed |= more
        ended = {p.operation for p in self.pending if doomed & _running(p)}
        released, reported = self.bench.engine.contexts.release(
            TENANT, list(ids), recursive=recursive
        )
        assert set(reported) == ended
        assert released.num_released == len(doomed)
        for context_id in doomed:
            self._forget(context_id)

        with self._unchanged_if_refused(Reason.CONTEXT_NOT_FOUND):
            self.bench.engine.contexts.release(TENANT, [*self.model, *ids])
            raise AssertionError("released twice")

    # -- time --------------------------------------------------------------------------------

    @rule(count=st.integers(1, 9))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.bench.step()
            self.take_in_all()

    @rule()
    def run_dry(self) -> None:
        self.bench.drain()

    @precondition(lambda self: self.pending)
    @rule(pick=picks)
    def cancel(self, pick: int) -> None:
        pending = self.pending[pick % len(self.pending)]
        self._take_in(pending)
        self.bench.engine.cancel(pending.operation)
        assert pending.operation.is_done
        if pending in self.pending:
            self.pending.remove(pending)
            if pending.is_create:
                self._forget(pending.ids[0])

    @rule()
    def flush(self) -> None:
        self.bench.engine.flush_cache()
        view = self.bench.pool_view
        assert view.cached == view.host.cached == view.disk.cached == 0

    @rule(moment=st.sampled_from(["before", "after"]), num_steps=st.integers(1, 12))
    def arm_fault(self, moment: str, num_steps: int) -> None:
        self.fault, self.fault_in = moment, num_steps

    @rule(num_moves=st.integers(1, 12))
    def arm_lost_move(self, num_moves: int) -> None:
        self.moves_until_lost = num_moves

    @rule(chance=st.sampled_from([0, 0, 3, 7]))
    def arm_non_finite(self, chance: int) -> None:
        self.bench.runner.non_finite = lambda sample: chance > 0 and sample.position % chance == 1

    # -- what must hold ----------------------------------------------------------------------

    @invariant()
    def audit(self) -> None:
        if not hasattr(self, "bench"):
            return
        self.take_in_all()
        self.bench.audit()
        assert {view.id for view in self._views()} == set(self.model)
        busy = {context_id for pending in self.pending for context_id in _running(pending)}
        for context_id, tokens in self.model.items():
            assert self.bench.tokens(context_id) == tokens
            view = self.bench.view(context_id)
            assert view.length == len(tokens)
            assert view.is_busy == (context_id in busy)

    def teardown(self) -> None:
        if not hasattr(self, "bench"):
            return
        self.fault = ""
        self.bench.drain()
        self.audit()
        assert not self.pending
        self.bench.end()

    def take_in_all(self) -> None:
        for pending in list(self.pending):
            self._take_in(pending)

    # -- inside ------------------------------------------------------------------------------

    def _pick(self, pick: int) -> str:
        ids = sorted(self.model, key=lambda context_id: int(context_id[1:]))
        return ids[pick % len(ids)]

    def _params(
        self, context_id: str, max_tokens: int, seed: int | None, stop_after: int | None
    ) -> SamplingParams:
        stops = () if stop_after is None else continuation(self.model[context_id], stop_after)[-1:]
        return SamplingParams(
            max_tokens=max_tokens,
            temperature=0 if seed is None else 1,
            seed=seed,
            stop_token_ids=tuple(stops),
            logprobs=True,
        )

    def _views(self) -> tuple[ContextView, ...]:
        return self.bench.engine.observer.list(TENANT, page_size=1000).contexts

    def _kept(self, view: ContextView) -> ContextView:
        """Shows a context with what KV it has in any tier, wherever and however shared that is.

        Looking at what a request needs may let a path stand on blocks of its own that lie in a
        lower tier, rather than on a sibling's on the device: no KV is lost by that.
        """
        tail = self.bench.engine._store.get(TENANT, view.id).tail
        kept = self.bench.tree.num_kept(tail)
        return replace(
            view, num_computed=kept, private_blocks=0, shared_blocks=0, reclaimable_blocks=0
        )

    def _fail(self, moment: str) -> None:
        self.fault_in -= moment == "before"
        if moment == self.fault and self.fault_in == 0:
            raise StepFailed(moment)

    def _loses(self, move: BlockMove) -> bool:
        self.moves_until_lost -= 1
        return self.moves_until_lost == 0

    @contextmanager
    def _unchanged_if_refused(self, *reasons: Reason) -> Iterator[None]:
        """Lets the block be refused, for these reasons if any are named, without a trace."""

        def state() -> object:
            pool = self.bench.pool_view
            queued = self.bench.engine.view().num_waiting
            return [self._kept(view) for view in self._views()], pool.free, pool.pinned, queued

        before = state()
        try:
            yield
        except AgentKVError as error:
            refusal = error
        else:
            return
        assert not reasons or refusal.reason in reasons
        _check_numbers(refusal, self.watermark)
        assert state() == before, "a refused call left a trace"

    def _take_in(self, pending: Pending) -> None:
        """Compares what an operation has to say with the model, and notes its end."""
        operation = pending.operation
        if isinstance(operation, Generation):
            self._take_in_generation(pending, operation)
        if not operation.is_done or pending not in self.pending:
            return
        self.pending.remove(pending)
        if isinstance(operation, Commit):
            self._take_in_commit(pending, operation)
        elif isinstance(operation, Scoring) and operation.error is None:
            for scored, tokens in zip(operation.answer.scores, pending.continuations, strict=True):
                assert list(scored.token_ids) == tokens
                assert list(scored.logprobs) == _logprobs(pending.base, tokens)
        elif isinstance(operation, Generation):
            assert pending.num_finished == len(pending.ids)
        if operation.error is not None:
            _check_numbers(operation.error, self.watermark)

    def _take_in_commit(self, pending: Pending, operation: Commit) -> None:
        (context_id,) = pending.ids
        if operation.error is not None:
            if pending.is_create:
                self._forget(context_id)
            return
        self.model[context_id] += pending.tokens
        answer = operation.answer
        assert answer.context.length == len(self.model[context_id])
        if pending.base:
            assert list(answer.logprobs) == _logprobs(pending.base, pending.tokens)
        if pending.is_create:
            usage = answer.usage
            assert usage.computed_tokens + usage.cached_tokens >= len(pending.tokens)

    def _take_in_generation(self, pending: Pending, operation: Generation) -> None:
        for update in operation.take_news():
            if isinstance(update, Branches):
                assert [view.id for view in update.contexts] == pending.ids
                continue
            context_id = pending.ids[update.branch]
            request = operation.requests[update.branch]
            if isinstance(update, Chunk):
                for token, value in zip(update.token_ids, update.logprobs, strict=True):
                    self._commit_token(request, context_id, token, value)
            elif isinstance(update, Finish):
                pending.num_finished += 1
                assert update.usage.generated_tokens == request.generated_tokens
                if context_id in self.model and update.context is not None:
                    assert update.context.length == len(self.model[context_id])
                if update.error is not None:
                    _check_numbers(update.error, self.watermark)

    def _commit_token(self, request: Request, context_id: str, token: int, value: float) -> None:
        tokens, params = self.model[context_id], request.params
        assert params is not None
        assert value == logprob(tokens, token)
        assert token == next_token(tokens, None if params.is_greedy else request.stream)
        tokens.append(token)

    def _forget(self, context_id: str) -> None:
        if context_id not in self.model:
            return
        del self.model[context_id], self.parents[context_id]
        for child_id, parent_id in self.parents.items():
            if parent_id == context_id:
                self.parents[child_id] = None


def _running(pending: Pending) -> set[str]:
    """Contexts whose request has not ended."""
    requests = pending.operation.requests
    return {r.context.id for r in requests if r.status is not RequestStatus.DONE}


def _logprobs(base: list[int], tokens: list[int]) -> list[float]:
    """One per token, but none for the first of all: nothing precedes it."""
    path = base + tokens
    first = max(len(base), 1)
    return [logprob(path[:position], path[position]) for position in range(first, len(path))]


def _check_numbers(error: AgentKVError, watermark: int) -> None:
    """Asserts that a refusal for lack of blocks is justified by its own numbers."""
    if error.reason is Reason.TENANT_QUOTA and error.metadata["quota"] == "blocks":
        need, free, reclaimable = (int(error.metadata[n]) for n in ("need", "free", "reclaimable"))
        assert free >= 0 and reclaimable >= 0
        assert need > free + reclaimable, "it would have fitted"
    if error.reason is not Reason.KV_BLOCKS_EXHAUSTED:
        return
    assert isinstance(error, PoolExhausted)
    names = ("need", "free", "reclaimable", "total")
    need, free, reclaimable, total = (int(error.metadata[name]) for name in names)
    assert need > 0
    assert 0 <= free <= total and 0 <= reclaimable <= total - free
    assert need > max(0, free + reclaimable - watermark), "it would have fitted"


TestEngineMachine = pytest.mark.slow(EngineMachine.TestCase)
TestEngineMachine.settings = settings(
    max_examples=150,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
    phases=(Phase.generate, Phase.shrink),
)
