"""The loop: verbs change contexts at once or become requests, and `step()` moves them on.

Single-threaded: every method is called from one thread, `AsyncEngine`'s or a test's. It knows
tokens and answers, not tensors and not the wire.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from agentkv.config import LimitsConfig, PoolConfig, SchedulerConfig
from agentkv.constraint import Continued, Tools
from agentkv.core.block_pool import BlockPool
from agentkv.core.context import Context, Region
from agentkv.core.context_store import ContextPage, ContextStore
from agentkv.core.context_tree import ContextTree
from agentkv.core.reply_table import ReplyTable
from agentkv.core.request import Request
from agentkv.core.scheduler import Scheduler
from agentkv.core.segment import Hold
from agentkv.core.views import ContextView, PoolView
from agentkv.engine.detokenizer import PRIMING_TOKENS, Detokenizer
from agentkv.engine.grammar import Grammar, GrammarMatcher
from agentkv.engine.grammar_compiler import GrammarCompiler
from agentkv.engine.operations import Commit, Generation, Operation, Scoring
from agentkv.engine.outputs import EngineView, ModelFacts, Released
from agentkv.engine.request_checks import RequestChecks
from agentkv.engine.request_factory import RequestFactory
from agentkv.engine.runner import Runner
from agentkv.engine.step_loop import StepLoop
from agentkv.engine.tokenizer import Tokenizer
from agentkv.engine.tool_format import ToolCall
from agentkv.errors import AgentKVError, NotFound
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
        end_token_ids: frozenset[int],
        new_id: Callable[[], str],
        new_seed: Callable[[], int],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.facts = facts
        self.tokenizer = tokenizer
        self.limits = limits
        self.grammars = GrammarCompiler(
            tokenizer, vocab_size=facts.vocab_size, end_token_ids=end_token_ids
        )
        """Compiles constraints; may be used on any thread."""
        self._tree = ContextTree(BlockPool(pool.num_blocks), block_size=pool.block_size)
        self._store = ContextStore(self._tree, limits, new_id)
        self._checks = RequestChecks(facts, limits)
        self._scheduler = Scheduler(self._store, scheduler, max_length=facts.max_length)
        self._loop = StepLoop(self._scheduler, runner, self._store)
        self._replies = ReplyTable(limits.max_replies, limits.reply_ttl)
        self._factory = RequestFactory(self._tree, end_token_ids, new_seed, facts.vocab_size)
        self._clock = clock
        self._num_forks = 0

    # -- identity ----------------------------------------------------------------------------

    def create(
        self,
        tenant: str,
        token_ids: Sequence[int],
        *,
        pinned: bool = False,
        labels: Mapping[str, str] | None = None,
        request_id: str | None = None,
        logprobs: bool = False,
    ) -> Commit:
        """Makes a context of these tokens; computes those that no cached prefix has.

        With `logprobs`, the answer has the log-probability of every token but the first.

        Raises:
            InvalidRequest: No token, a token id beyond the vocabulary, or too many tokens.
            PoolExhausted: The pool cannot hold it, the tenant has too many contexts, or too many
                requests wait.
        """
        body = (tuple(token_ids), pinned, tuple((labels or {}).items()), logprobs)
        known = self._replies.find(tenant, "Create", request_id, body, self._clock())
        if isinstance(known, Commit) and not known.has_failed:
            return known
        self._checks.prompt(token_ids)
        context = self._store.create(
            tenant, token_ids, pinned=pinned, labels=labels or {}, now=self._clock()
        )
        operation = Commit(
            context,
            [self._factory.completion(context, with_logprobs=logprobs)],
            self._store.view,
            self.pool_view,
            is_create=True,
        )
        try:
            self._loop.submit(operation)
        except AgentKVError:
            self._store.release(context)
            raise
        self._replies.record(tenant, "Create", request_id, body, operation, self._clock())
        return operation

    def fork(
        self,
        tenant: str,
        context_id: str,
        *,
        count: int = 1,
        at: int | None = None,
        labels: Mapping[str, str] | None = None,
        request_id: str | None = None,
    ) -> tuple[ContextView, ...]:
        """Makes `count` contexts that share this one's tokens before `at` (default: all).

        Takes no block and copies nothing, whatever the length. While a request changes the
        context, the fork is of its last committed token.

        Raises:
            NotFound: The handle is unknown.
            InvalidRequest: `count` or `at` is out of range.
            PoolExhausted: A limit on contexts or depth; never blocks.
        """
        body = (context_id, count, at, tuple((labels or {}).items()))
        known = self._replies.find(tenant, "Fork", request_id, body, self._clock())
        if isinstance(known, tuple):
            return known
        children = self._fork(self._store.get(tenant, context_id), count, at, labels or {})
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
    ) -> Commit:
        """Appends given tokens, all or none.

        Raises:
            NotFound, ContextBusy, ContextMoved: See `ContextStore.get_idle`.
            InvalidRequest: A token id beyond the vocabulary, or over the model's longest context.
            PoolExhausted: The pool cannot hold it, or too many requests wait.
        """
        context = self._store.get_idle(tenant, context_id, expected_length)
        self._checks.tokens(token_ids, length=context.length)
        head = self._tree.heads.get(context.tail)
        requests = []
        if token_ids:
            requests.append(self._factory.extension(context, token_ids, with_logprobs=logprobs))
        operation = Commit(context, requests, self._store.view, self.pool_view)
        try:
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
        context = self._store.get_idle(tenant, context_id, expected_length)
        return self._generate([context], params, context.length, grammar, is_single=True)

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
        parent = self._store.get(tenant, context_id)
        if at is None or at <= parent.length:  # the fork below refuses a position beyond
            length = parent.length if at is None else at
            self._checks.generation(params, self._factory.ends(params), length=length)
            self._checks.grammar(params, grammar, parent.region_at(length))
        children = self._fork(parent, count, at, labels or {})
        try:
            return self._generate(children, params, children[0].length, grammar, is_single=False)
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
        parent = self._store.get(tenant, context_id)
        self._checks.continuations(continuations, length=parent.length)
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
        context = self._store.get_idle(tenant, context_id, expected_length)
        self._store.truncate(context, length)
        return self._store.view(context)

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
        residency, pool = self._tree.residency, self._tree.pool
        return PoolView(
            total=pool.num_blocks,
            free=pool.num_free,
            live=residency.held[Hold.KV],
            cached=residency.num_reclaimable,
            pinned=residency.held[Hold.PINNED],
            block_size=self._tree.block_size,
            used_slots=residency.used_slots,
        )

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
        )

    # -- the loop ----------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return self._scheduler.has_work

    def step(self) -> Sequence[Operation]:
        """Runs one step; returns the operations that have news."""
        return self._loop.step()

    def run(self, operation: OperationT) -> OperationT:
        """Steps until an operation is done; raises its error. For callers without a loop."""
        while not operation.is_done:
            self.step()
        if operation.error is not None:
            raise operation.error
        return operation

    def cancel(self, operation: Operation) -> None:
        """Ends what still runs of an operation; contexts stay at their last committed token."""
        self._loop.cancel(operation)

    def flush_cache(self) -> None:
        """Frees the KV of everything no context holds."""
        self._tree.flush()

    def check(self) -> None:
        """Asserts every invariant of the bookkeeping."""
        self._store.check()

    # -- inside ------------------------------------------------------------------------------

    def _fork(
        self, parent: Context, count: int, at: int | None, labels: Mapping[str, str]
    ) -> Sequence[Context]:
        children = self._store.fork(parent, count=count, at=at, labels=labels, now=self._clock())
        self._num_forks += count
        return children

    def _generate(
        self,
        contexts: Sequence[Context],
        params: SamplingParams,
        length: int,
        grammar: Grammar | Continued | None,
        *,
        is_single: bool,
    ) -> Generation:
        self._checks.generation(params, self._factory.ends(params), length=length)
        self._checks.grammar(params, grammar, contexts[0].region)
        seed = self._factory.seed(params)
        requests = self._factory.generations(contexts, params, seed)
        region = contexts[0].region
        if isinstance(grammar, Grammar):
            region = Region(grammar, length)
        if grammar is not None and region is not None:
            for request in requests:
                request.matcher = self._matcher(request, region)
        prime = self._tree.last_tokens(contexts[0].tail, PRIMING_TOKENS)
        operation = Generation(
            requests,
            [Detokenizer(self.tokenizer, prime, params.stop) for _ in contexts],
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
