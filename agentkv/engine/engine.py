"""The loop: verbs change contexts at once or become requests, and `step()` moves them on.

Single-threaded: every method is called from one thread, `AsyncEngine`'s or a test's. It knows
tokens and answers, not tensors and not the wire.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from agentkv.config import (
    LeaseConfig,
    LimitsConfig,
    PoolConfig,
    PressureConfig,
    QuotasConfig,
    SchedulerConfig,
)
from agentkv.constraint import Continued, Tools
from agentkv.core.block_move import Tier
from agentkv.core.block_pool import BlockPool
from agentkv.core.context import Context, Region
from agentkv.core.context_store import ContextPage, ContextStore
from agentkv.core.context_tree import ContextTree
from agentkv.core.drafter import Propose, look_up
from agentkv.core.eviction import flush
from agentkv.core.lease import DEFAULT_TERMS, LeaseTerms
from agentkv.core.lease_keeper import LeaseKeeper
from agentkv.core.lower_tiers import LowerTiers
from agentkv.core.pressure import PressureGauge
from agentkv.core.rendering import Rendering
from agentkv.core.reply_table import ReplyTable
from agentkv.core.request import Request
from agentkv.core.scheduler import Scheduler
from agentkv.core.segment import Hold
from agentkv.core.usage_view import UsageView
from agentkv.core.views import ContextView, PoolView
from agentkv.core.watch import Watcher
from agentkv.engine.conversation import Conversation
from agentkv.engine.detokenizer import PRIMING_TOKENS, Detokenizer
from agentkv.engine.grammar import Grammar, GrammarMatcher
from agentkv.engine.grammar_compiler import GrammarCompiler
from agentkv.engine.operations import Commit, Generation, Operation, Scoring
from agentkv.engine.outputs import ChatState, EngineView, Leased, ModelFacts, Released
from agentkv.engine.request_checks import RequestChecks
from agentkv.engine.request_factory import RequestFactory
from agentkv.engine.runner import Mover, Runner
from agentkv.engine.snapshot_desk import KVPorter, SnapshotDesk
from agentkv.engine.snapshot_store import SnapshotFolder
from agentkv.engine.step_loop import StepLoop
from agentkv.engine.tokenizer import Tokenizer
from agentkv.engine.tool_format import ToolCall
from agentkv.errors import AgentKVError, InvalidRequest, NotFound, Reason
from agentkv.sampling_params import SamplingParams

OperationT = TypeVar("OperationT", bound=Operation)


class Engine:
    """Contexts and the requests on them, over one model and one pool.

    Every verb either is refused before anything changed, or is done (`fork`, `truncate`,
    `release`), or returns an `Operation` that steps complete. Cancelling an operation leaves
    each context at its last committed token.
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
        self.grammars = GrammarCompiler(
            tokenizer, vocab_size=facts.vocab_size, end_token_ids=end_token_ids
        )
        """Compiles constraints; may be used on any thread."""
        self.lease_limits = leases
        lower = LowerTiers(
            pool.block_size, host_blocks=pool.host_blocks, disk_blocks=pool.disk_blocks
        )
        self._tree = ContextTree(
            BlockPool(pool.num_blocks), block_size=pool.block_size, lower=lower
        )
        self._store = ContextStore(self._tree, limits, new_id, quotas)
        self._leases = LeaseKeeper(self._store, self._store.hub, leases)
        self._gauge = PressureGauge(pressure)
        self._level = self.pool_view().level
        self._checks = RequestChecks(facts, limits)
        self._scheduler = Scheduler(
            self._store, scheduler, max_length=facts.max_length, propose=propose
        )
        self._loop = StepLoop(
            self._scheduler, runner, self._store, self._tick, mover=mover, timer=timer
        )
        self._replies = ReplyTable(limits.max_replies, limits.reply_ttl)
        self._factory = RequestFactory(
            self._tree,
            end_token_ids,
            new_seed,
            facts.vocab_size,
            scheduler.num_speculative_tokens,
        )
        self._clock = clock
        self._timer = timer
        self._num_forks = 0
        self.snapshot_folder = snapshot_folder
        self.snapshots = SnapshotDesk(
            self._store, self._leases, facts, limits, clock, self._tick, porter
        )

    # -- identity ----------------------------------------------------------------------------

    def create(
        self,
        tenant: str,
        token_ids: Sequence[int],
        *,
        lease: LeaseTerms = DEFAULT_TERMS,
        labels: Mapping[str, str] | None = None,
        request_id: str | None = None,
        logprobs: bool = False,
        chat: Conversation | None = None,
        adapter: str = "",
    ) -> Commit:
        """Makes a context of these tokens; computes those that no cached prefix has.

        `chat` is the conversation that the tokens were made of, if they were made of one.

        With `logprobs`, the answer has the log-probability of every token but the first. An
        adapter is for good: branches inherit it, and nothing is shared with other adapters.

        Raises:
            InvalidRequest: No such adapter, no token, a token id beyond the vocabulary, too many
                tokens, or a time that no lease can have.
            PoolExhausted: The pool cannot hold it, the tenant has too many contexts or pins, or
                too many requests wait.
        """
        self._tick()
        now = self._clock()
        body = (tuple(token_ids), lease, tuple((labels or {}).items()), logprobs, chat, adapter)
        known = self._replies.find(tenant, "Create", request_id, body, now)
        if isinstance(known, Commit) and not known.has_failed:
            if not known.context.is_released:
                self._leases.touch(known.context, now)
            return known
        self._checks.adapter(adapter)
        self._checks.prompt(token_ids)
        proposed = self._leases.propose(lease)
        context = self._store.create(
            tenant, token_ids, lease=proposed, labels=labels or {}, now=now, adapter=adapter
        )
        request = self._factory.completion(context, with_logprobs=logprobs)
        if chat is not None:
            request.rendering = Rendering(chat, len(token_ids))
        operation = Commit(
            context,
            [request],
            self._store.view,
            self.pool_view,
            is_create=True,
        )
        try:
            self._leases.check_pins([context], may_reduce=lease.may_reduce)
            self._loop.submit(operation)
        except AgentKVError:
            self._store.release(context)
            raise
        self._leases.admit(context, now)
        self._replies.record(tenant, "Create", request_id, body, operation, now)
        return operation

    def disown(self, operation: Commit) -> None:
        """Notes that the caller of a Create went away before the answer of it came.

        A context that only that answer would have named is released; one that a repeat of the call
        may ask for stays for a while.
        """
        context = operation.context
        if not operation.is_create or not operation.is_done or context.is_released:
            return
        self._tick()
        if self._replies.holds(operation):
            self._leases.disown(context)
        elif context.request is None:
            self._store.release(context)

    def fork(
        self,
        tenant: str,
        context_id: str,
        *,
        count: int = 1,
        at: int | None = None,
        lease: LeaseTerms | None = None,
        labels: Mapping[str, str] | None = None,
        request_id: str | None = None,
    ) -> tuple[ContextView, ...]:
        """Makes `count` contexts that share this one's tokens before `at` (default: all).

        Takes no block and copies nothing, whatever the length. While a request changes the
        context, the fork is of its last committed token.

        Raises:
            NotFound: The handle is unknown.
            InvalidRequest: `count` or `at` is out of range.
            PoolExhausted: A limit on contexts, depth or pins; never blocks.
        """
        self._tick()
        body = (context_id, count, at, lease, tuple((labels or {}).items()))
        known = self._replies.find(tenant, "Fork", request_id, body, self._clock())
        if isinstance(known, tuple):
            return known
        parent = self._store.get(tenant, context_id)
        children = self._fork(parent, count, at, labels or {}, lease)
        views = tuple(self._store.view(child) for child in children)
        self._replies.record(tenant, "Fork", request_id, body, views, self._clock())
        return views

    def release(
        self,
        tenant: str,
        context_ids: Sequence[str],
        *,
        recursive: bool = False,
        allow_missing: bool = False,
    ) -> tuple[Released, Sequence[Operation]]:
        """Forgets contexts, with all that descend from them if `recursive`; all or none.

        A request on one of them ends with CONTEXT_RELEASED. Other contexts keep what they share.

        Returns:
            What was released, and the operations that have news because of it.

        Raises:
            NotFound: A handle is unknown and `allow_missing` is false.
        """
        self._tick()
        doomed: dict[Context, None] = {}
        for context_id in context_ids:
            try:
                context = self._store.get(tenant, context_id)
            except NotFound:
                if not allow_missing:
                    raise
                continue
            found = self._store.descendants(context) if recursive else [context]
            doomed.update(dict.fromkeys(found))
        live_before = self._tree.residency.held[Hold.KV]
        ended: dict[Operation, None] = {}
        for context in doomed:
            if context.request is not None:
                ended[self._loop.end_released(context.request)] = None
            if not context.is_released:
                self._store.release(context)
        freed = live_before - self._tree.residency.held[Hold.KV]
        return Released(len(doomed), freed, self.pool_view()), tuple(ended)

    # -- tokens ------------------------------------------------------------------------------

    def extend(
        self,
        tenant: str,
        context_id: str,
        token_ids: Sequence[int],
        *,
        expected_length: int | None = None,
        logprobs: bool = False,
        chat: Conversation | None = None,
    ) -> Commit:
        """Appends given tokens, all or none.

        `chat` is what the tokens add to the conversation that the context was made of.

        Raises:
            NotFound, ContextBusy, ContextMoved: See `ContextStore.get_idle`.
            InvalidRequest: A token id beyond the vocabulary, or over the model's longest context.
            PoolExhausted: The pool cannot hold it, or too many requests wait.
        """
        self._tick()
        context = self._store.get_idle(tenant, context_id, expected_length)
        self._checks.tokens(token_ids, length=context.length)
        self._leases.resume(context, self._clock())
        head = self._tree.heads.get(context.tail)
        requests = []
        if token_ids:
            requests.append(self._factory.extension(context, token_ids, with_logprobs=logprobs))
            if chat is not None:
                end = context.length + len(token_ids)
                requests[0].rendering = Rendering(chat, end, context.rendering)
        operation = Commit(context, requests, self._store.view, self.pool_view)
        try:
            self._leases.check_pins([context])
            self._loop.submit(operation)
        except AgentKVError:
            self._store.truncate(context, context.length)
            if head is not None:  # appending dropped it
                self._tree.heads.keep(context.tail, head)
            raise
        return operation

    def generate(
        self,
        tenant: str,
        context_id: str,
        params: SamplingParams,
        *,
        expected_length: int | None = None,
        grammar: Grammar | Continued | None = None,
    ) -> Generation:
        """Samples tokens and commits each as it comes.

        Args:
            tenant: The caller.
            context_id: Handle of the context.
            params: How to sample.
            expected_length: Length the context must have; None: any.
            grammar: What the text must match from here on, or `Continued`: the grammar of the
                context's last constrained generation, from where that began.

        Raises:
            NotFound, ContextBusy, ContextMoved: See `ContextStore.get_idle`.
            InvalidRequest: The context is empty or at the model's longest, a stop token is
                beyond the vocabulary, or there is no grammar to continue.
            PoolExhausted: The pool cannot hold it, or too many requests wait.
        """
        self._tick()
        context = self._store.get_idle(tenant, context_id, expected_length)
        ends = self._factory.ends(params)
        self._checks.generation(params, ends, length=context.length)
        self._checks.grammar(params, grammar, context.region)
        self._leases.resume(context, self._clock())
        return self._generate([context], params, grammar, is_single=True)

    def generate_branches(
        self,
        tenant: str,
        context_id: str,
        count: int,
        params: SamplingParams,
        *,
        at: int | None = None,
        labels: Mapping[str, str] | None = None,
        grammar: Grammar | Continued | None = None,
    ) -> Generation:
        """Forks `count` branches and generates on each, in one stream; all or none.

        Branch i draws from the stream (seed, i) whatever the others do.

        Raises:
            As `fork` and `generate`.
        """
        self._tick()
        parent = self._store.get(tenant, context_id)
        if at is None or at <= parent.length:  # the fork below refuses a position beyond
            length = parent.length if at is None else at
            self._checks.generation(params, self._factory.ends(params), length=length)
            self._checks.grammar(params, grammar, parent.region_at(length))
        children = self._fork(parent, count, at, labels or {}, None)
        try:
            return self._generate(children, params, grammar, is_single=False)
        except AgentKVError:
            for child in children:
                self._store.release(child)
            raise

    def score(
        self, tenant: str, context_id: str, continuations: Sequence[Sequence[int]]
    ) -> Scoring:
        """Computes the log-probability of each token of each continuation.

        The context does not change; the continuations share its KV.

        Raises:
            NotFound: The handle is unknown.
            InvalidRequest: No continuation or an empty one, too many, a token id beyond the
                vocabulary, too long, or an empty context.
            PoolExhausted: The pool cannot hold one of them, or too many requests wait.
        """
        self._tick()
        parent = self._store.get(tenant, context_id)
        self._checks.continuations(continuations, length=parent.length)
        self._leases.resume(parent, self._clock())
        children = self._store.fork_hidden(parent, len(continuations))
        requests = [
            self._factory.scoring(child, token_ids)
            for child, token_ids in zip(children, continuations, strict=True)
        ]
        operation = Scoring(requests, continuations)
        try:
            self._loop.submit(operation)
        except AgentKVError:
            for child in children:
                self._store.release(child)
            raise
        return operation

    def truncate(
        self, tenant: str, context_id: str, length: int, *, expected_length: int | None = None
    ) -> ContextView:
        """Takes a context back to its first `length` tokens.

        Raises:
            NotFound, ContextBusy, ContextMoved: See `ContextStore.get_idle`.
            InvalidRequest: The context is shorter than that.
        """
        self._tick()
        context = self._store.get_idle(tenant, context_id, expected_length)
        self._store.truncate(context, length)
        self._leases.touch(context, self._clock())
        return self._store.view(context)

    # -- residency ---------------------------------------------------------------------------

    def update_lease(
        self, tenant: str, context_id: str, terms: LeaseTerms, *, recursive: bool = False
    ) -> Leased:
        """Gives a context, and all that descend from it if `recursive`, a lease; all or none.

        Without mode and time it is a sign of life: the lease they have is renewed.

        Raises:
            NotFound: The handle is unknown.
            InvalidRequest: The time is one that no lease can have.
            PoolExhausted: The pins would exceed the tenant's quota.
        """
        self._tick()
        context = self._store.get(tenant, context_id)
        contexts = self._store.descendants(context) if recursive else [context]
        self._leases.update(contexts, terms, self._clock())
        for leased in contexts:
            self._scheduler.park_if_leased(leased)
        return Leased(self._store.view(context), len(contexts), self.pool_view())

    # -- durability --------------------------------------------------------------------------

    def find_reply(
        self, tenant: str, method: str, request_id: str | None, body: object
    ) -> object | None:
        """Finds the answer to an earlier call with this id; None when there is none.

        Raises:
            InvalidRequest: The id was used with another body.
        """
        return self._replies.find(tenant, method, request_id, body, self._clock())

    def record_reply(
        self, tenant: str, method: str, request_id: str | None, body: object, answer: object
    ) -> None:
        """Remembers an answer for a repeat of the call."""
        self._replies.record(tenant, method, request_id, body, answer, self._clock())

    # -- observers ---------------------------------------------------------------------------

    def get(self, tenant: str, context_id: str) -> ContextView:
        """Describes one context.

        Raises:
            NotFound: The handle is unknown.
        """
        return self._store.view(self._store.get(tenant, context_id))

    def tokens(
        self, tenant: str, context_id: str, start: int = 0, *, limit: int | None = None
    ) -> tuple[int, ...]:
        """Reads the committed tokens of a context in [start, start + limit); default: all.

        Raises:
            NotFound: The handle is unknown.
            InvalidRequest: The context is shorter than `start`.
        """
        return self._store.tokens(self._store.get(tenant, context_id), start, limit)

    def chat(
        self, tenant: str, context_id: str, *, expected_length: int | None = None
    ) -> ChatState:
        """Tells what conversation an idle context was made of, and what follows it there.

        Raises:
            NotFound, ContextBusy, ContextMoved: See `ContextStore.get_idle`.
            InvalidRequest: It was not made of messages, or was cut to less than their tokens.
        """
        context = self._store.get_idle(tenant, context_id, expected_length)
        if context.rendering is None:
            raise InvalidRequest(
                "The context was not made of messages, or was cut within the first of them; extend "
                "it by text, or create another from the whole conversation.",
                reason=Reason.CHAT_NOT_EXTENDABLE,
                metadata={"common_length": 0},
            )
        calls = [call for call in context.rendering if isinstance(call, Conversation)]
        turn_ids = self._store.tokens(context, context.rendering.end, None)
        return ChatState(Conversation.joined(calls), turn_ids, context.length)

    def list(
        self,
        tenant: str,
        *,
        root_id: str | None = None,
        page_size: int = 100,
        page_token: str = "",
    ) -> ContextPage:
        """Lists a tenant's contexts, all or those of one tree, a page at a time."""
        return self._store.page(tenant, root_id=root_id, page_size=page_size, page_token=page_token)

    def pool_view(self) -> PoolView:
        """Describes the pool."""
        held, pool = self._tree.residency.held, self._tree.pool
        total, firm = pool.num_blocks, held[Hold.FIRM]
        return PoolView(
            total=total,
            free=pool.num_free,
            live=held[Hold.KV],
            cached=self._tree.residency.num_reclaimable,
            pinned=held[Hold.PINNED],
            block_size=self._tree.block_size,
            used_slots=self._tree.residency.used_slots,
            reclaimable=total - pool.num_free - firm,
            level=self._gauge.read(held=held[Hold.KV], firm=firm, total=total),
            host=self._tree.lower.view(Tier.HOST),
            disk=self._tree.lower.view(Tier.DISK),
        )

    def watch(self, tenant: str) -> Watcher:
        """Begins to tell a tenant what happens to its contexts, a snapshot first."""
        return self._store.hub.watch(
            tenant, lambda tenant: (self._store.views(tenant), self.pool_view())
        )

    def unwatch(self, watcher: Watcher) -> None:
        """Ends a watch; ending it twice is fine."""
        self._store.hub.leave(watcher)

    def end_watches(self, error: AgentKVError) -> Sequence[Watcher]:
        """Ends every watch by an error; returns those that are to hear it."""
        watchers = tuple(self._store.hub.watchers)
        for watcher in watchers:
            watcher.error = error
            self._store.hub.leave(watcher)
        return watchers

    def watchers(self) -> Sequence[Watcher]:
        """Lists the watchers that have news, once what changed meanwhile was told to them."""
        watchers = self._store.hub.watchers
        if watchers:
            pool = self.pool_view()
            if pool.level is not self._level:
                self._level = pool.level
                self._store.hub.tell_pressure(pool)
        return [watcher for watcher in watchers if watcher.has_more]

    def usage(
        self, tenant: str, *, context_id: str | None = None, root_id: str | None = None
    ) -> UsageView:
        """Shows what a context, a tree or else the whole tenant has used until now.

        Raises:
            NotFound: No such context or tree.
        """
        self._tick()
        return self._store.usage(tenant, context_id=context_id, root_id=root_id)

    def view(self) -> EngineView:
        """Describes the engine."""
        counts, queues = self._scheduler.statistics(), self._scheduler.queues
        return EngineView(
            model=self.facts,
            pool=self.pool_view(),
            num_contexts=len(self._store),
            num_running=len(queues.running),
            num_waiting=len(queues.waiting),
            computed_tokens=counts.computed_tokens,
            num_forks=self._num_forks,
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

    def step(self) -> Sequence[Operation]:
        """Runs one step; returns the operations that have news."""
        operations = self._loop.step()
        for operation in operations:
            for request in operation.requests:
                self._leases.trim_pin(
                    request.context
                )  # generating may have made it outgrow its pin
        return operations

    def advance(self) -> None:
        """Does what time alone brings: leases expire, and contexts nobody uses are released."""
        self._tick()
        for context in self._leases.advance(self._clock()):
            self._store.release(context)

    @property
    def idle_time(self) -> float | None:
        """Seconds until `advance` has something to do, at least 0; None when nothing is due."""
        due = self._leases.next_due
        return None if due is None else max(0.0, due - self._clock())

    def run(self, operation: OperationT) -> OperationT:
        """Steps until an operation is done; raises its error. For callers without a loop."""
        while not operation.is_done:
            self.step()
        if operation.error is not None:
            raise operation.error
        return operation

    def cancel(self, operation: Operation) -> None:
        """Ends what still runs of an operation; contexts stay at their last committed token."""
        self._tick()
        self._loop.cancel(operation)

    def flush_cache(self) -> None:
        """Frees the KV of everything no context holds."""
        self._tick()
        flush(self._tree)

    def close(self) -> None:
        """Gives back what the tiers below the pool hold outside this process's memory."""
        self._loop.close()

    def check(self) -> None:
        """Asserts every invariant of the bookkeeping."""
        self._store.check()

    # -- inside ------------------------------------------------------------------------------

    def _tick(self) -> None:
        """Tells the ledger the time, before anything changes."""
        self._store.ledger.advance(self._timer())

    def _fork(
        self,
        parent: Context,
        count: int,
        at: int | None,
        labels: Mapping[str, str],
        terms: LeaseTerms | None,
    ) -> Sequence[Context]:
        now = self._clock()
        lease = self._leases.inherited(parent, terms)
        children = self._store.fork(parent, count=count, at=at, lease=lease, labels=labels, now=now)
        may_reduce = terms is None or terms.may_reduce
        try:
            self._leases.check_pins(children, may_reduce=may_reduce)
        except AgentKVError:
            for child in children:
                self._store.release(child)
            raise
        self._leases.touch(parent, now)
        for child in children:
            self._leases.admit(child, now)
        self._num_forks += count
        return children

    def _generate(
        self,
        contexts: Sequence[Context],
        params: SamplingParams,
        grammar: Grammar | Continued | None,
        *,
        is_single: bool,
    ) -> Generation:
        seed = self._factory.seed(params)
        requests = self._factory.generations(contexts, params, seed)
        region = contexts[0].region
        if isinstance(grammar, Grammar):
            region = Region(grammar, contexts[0].length)
        if grammar is not None and region is not None:
            for request in requests:
                request.matcher = self._matcher(request, region)
        prime = self._tree.last_tokens(contexts[0].tail, PRIMING_TOKENS)
        operation = Generation(
            requests,
            [
                Detokenizer(self.tokenizer, prime, params.stop, include_stop=params.include_stop)
                for _ in contexts
            ],
            self._store.view,
            self.pool_view,
            self._loop.end,
            read_calls=self._tool_calls,
            seed=seed,
            is_single=is_single,
        )
        self._loop.submit(operation)
        for context in contexts:
            context.region = region
        return operation

    def _matcher(self, request: Request, region: Region) -> GrammarMatcher:
        """Makes the state of a grammar after what a context's region holds."""
        assert isinstance(region.grammar, Grammar) and request.params is not None
        context = request.context
        history = tuple(self._tree.tokens(context.tail, region.start, context.length))
        # A token that is not sampled has no log-probability, and is not kept from being chosen.
        asks = request.params.logprobs or request.rules or request.early_rules
        return GrammarMatcher(region.grammar, history, jumps=not asks)

    def _tool_calls(self, context: Context) -> Sequence[ToolCall]:
        """Finds the call that a context's region ends with, if it is of tools and does."""
        region = context.region
        if region is None or not isinstance(region.grammar, Grammar):
            return ()
        constraint = region.grammar.constraint
        if not isinstance(constraint, Tools):
            return ()
        text = self.tokenizer.decode(self._store.tokens(context, region.start, None))
        return self.grammars.tool_format.read(text, constraint)
