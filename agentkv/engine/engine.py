"""The engine: what its verbs work on, put together, and the loop that moves their requests on.

Single-threaded: every method is called from one thread, `AsyncEngine`'s or a test's. It knows
tokens and answers, not tensors and not the wire.
"""

import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from agentkv.config import (
    LeaseConfig,
    LimitsConfig,
    PoolConfig,
    PressureConfig,
    QuotasConfig,
    SchedulerConfig,
)
from agentkv.core.block_pool import BlockPool
from agentkv.core.context_store import ContextStore
from agentkv.core.context_tree import ContextTree
from agentkv.core.drafter import Propose, look_up
from agentkv.core.eviction import flush
from agentkv.core.lease_keeper import LeaseKeeper
from agentkv.core.lower_tiers import LowerTiers
from agentkv.core.observer import Observer
from agentkv.core.pressure import PressureGauge
from agentkv.core.reply_table import ReplyTable
from agentkv.core.scheduler import Scheduler
from agentkv.core.watch import Watcher
from agentkv.engine.contexts import Contexts
from agentkv.engine.engine_clock import EngineClock
from agentkv.engine.grammar_compiler import GrammarCompiler
from agentkv.engine.inference import Inference
from agentkv.engine.operations import Commit, Operation
from agentkv.engine.outputs import EngineView, ModelFacts
from agentkv.engine.request_checks import RequestChecks
from agentkv.engine.request_factory import RequestFactory
from agentkv.engine.runner import Mover, Runner
from agentkv.engine.snapshot_desk import KVPorter, SnapshotDesk
from agentkv.engine.snapshot_store import SnapshotFolder
from agentkv.engine.step_loop import StepLoop
from agentkv.engine.tokenizer import Tokenizer

OperationT = TypeVar("OperationT", bound=Operation)


class Engine:
    """Contexts and the requests on them, over one model and one pool.

    Its verbs stand in families: `contexts`, `inference`, `snapshots`, and `observer` for what
    changes nothing. Each verb either is refused before anything changed, or is done, or returns
    an `Operation` that steps complete. Cancelling an operation leaves each context at its last
    committed token.
    """

    def __init__(
        self,
        runner: Runner,
        facts: ModelFacts,
        tokenizer: Tokenizer,
        *,
        pool: PoolConfig,
        scheduler: SchedulerConfig,
        limits: LimitsConfig,
        leases: LeaseConfig,
        pressure: PressureConfig,
        quotas: QuotasConfig | None = None,
        porter: KVPorter | None = None,
        snapshot_folder: SnapshotFolder | None = None,
        end_token_ids: frozenset[int],
        new_id: Callable[[], str],
        new_seed: Callable[[], int],
        clock: Callable[[], float] = time.time,
        timer: Callable[[], float] = time.monotonic,
        mover: Mover | None = None,
        propose: Propose = look_up,
    ) -> None:
        assert mover is not None or not pool.host_blocks
        self.facts = facts
        self.tokenizer = tokenizer
        self.limits = limits
        self.lease_limits = leases
        self.grammars = GrammarCompiler(
            tokenizer, vocab_size=facts.vocab_size, end_token_ids=end_token_ids
        )
        """Compiles constraints; may be used on any thread."""
        self._tree = _make_tree(pool)
        self._store = ContextStore(self._tree, limits, new_id, quotas)
        self.clock = EngineClock(self._store.ledger, clock, timer)
        self.replies = ReplyTable(limits.max_replies, limits.reply_ttl)
        self._leases = LeaseKeeper(self._store, self._store.hub, leases)
        self._scheduler = Scheduler(
            self._store, scheduler, max_length=facts.max_length, propose=propose
        )
        self._loop = StepLoop(
            self._scheduler, runner, self._store, self.clock.tick, mover=mover, timer=timer
        )
        self.observer = Observer(self._store, PressureGauge(pressure), self.clock.tick)
        checks = RequestChecks(facts, limits)
        factory = RequestFactory(
            self._tree,
            end_token_ids,
            new_seed,
            facts.vocab_size,
            scheduler.num_speculative_tokens,
        )
        self.contexts = Contexts(
            self._store,
            self.observer,
            self._leases,
            self.clock,
            self.replies,
            checks=checks,
            factory=factory,
            loop=self._loop,
        )
        self.inference = Inference(
            self._store,
            self.observer,
            self._leases,
            self.clock,
            self.contexts,
            checks=checks,
            factory=factory,
            loop=self._loop,
            tokenizer=tokenizer,
            grammars=self.grammars,
        )
        self.snapshot_folder = snapshot_folder
        self.snapshots = SnapshotDesk(
            self._store, self.observer, self._leases, self.clock, facts, porter
        )

    def view(self) -> EngineView:
        """Describes the engine."""
        counts, queues = self._scheduler.statistics(), self._scheduler.queues
        return EngineView(
            model=self.facts,
            pool=self.observer.pool(),
            num_contexts=len(self._store),
            num_running=len(queues.running),
            num_waiting=len(queues.waiting),
            computed_tokens=counts.computed_tokens,
            num_forks=self.contexts.num_forks,
            num_block_copies=counts.num_block_copies,
            num_preemptions=counts.num_preemptions,
            num_moved_out=counts.num_moved_out,
            num_brought_back=counts.num_brought_back,
            num_lost=counts.num_lost,
        )

    # -- the loop ----------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return self._scheduler.has_work

    def step(self, meanwhile: Callable[[], None] = lambda: None) -> Sequence[Operation]:
        """Runs one step; returns the operations that have news.

        Args:
            meanwhile: Called once, on this thread, when the step has nothing for it to do for a
                while; quick, and never fails.
        """
        operations = self._loop.step(meanwhile)
        for operation in operations:
            for request in operation.requests:
                self._leases.trim_pin(request.context)  # generating may have outgrown its pin
        return operations

    def watchers(self) -> Sequence[Watcher]:
        """Lists the watchers that have news, once what changed meanwhile was told to them."""
        return self.observer.watchers()

    def advance(self) -> None:
        """Does what time alone brings: leases expire, and contexts nobody uses are released."""
        self.clock.tick()
        for context in self._leases.advance(self.clock.now()):
            self._store.release(context)

    @property
    def idle_time(self) -> float | None:
        """Seconds until `advance` has something to do, at least 0; None when nothing is due."""
        due = self._leases.next_due
        return None if due is None else max(0.0, due - self.clock.now())

    def run(self, operation: OperationT) -> OperationT:
        """Steps until an operation is done; raises its error. For callers without a loop."""
        while not operation.is_done:
            self.step()
        if operation.error is not None:
            raise operation.error
        return operation

    def cancel(self, operation: Operation) -> None:
        """Ends what still runs of an operation; contexts stay at their last committed token."""
        self.clock.tick()
        self._loop.cancel(operation)

    def disown(self, operation: Commit) -> None:
        """Notes that the caller of a Create went away before the answer of it came.

        A context that only that answer would have named is released; one that a repeat of the call
        may ask for stays for a while.
        """
        context = operation.context
        if not operation.is_create or not operation.is_done or context.is_released:
            return
        self.clock.tick()
        if self.replies.holds(operation):
            self._leases.disown(context)
        elif context.request is None:
            self._store.release(context)

    def flush_cache(self) -> None:
        """Frees the KV of everything no context holds."""
        self.clock.tick()
        flush(self._tree)

    def close(self) -> None:
        """Gives back what the tiers below the pool hold outside this process's memory."""
        self._loop.close()

    def check(self) -> None:
        """Asserts every invariant of the bookkeeping."""
        self._store.check()


def _make_tree(pool: PoolConfig) -> ContextTree:
    lower = LowerTiers(pool.block_size, host_blocks=pool.host_blocks, disk_blocks=pool.disk_blocks)
    return ContextTree(BlockPool(pool.num_blocks), block_size=pool.block_size, lower=lower)
