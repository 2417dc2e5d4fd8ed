"""Verbs that ask the model: which tokens may follow a context, and how likely given ones are."""

from collections.abc import Mapping, Sequence

from agentkv.constraint import Continued, Tools
from agentkv.core.context import Context, Region
from agentkv.core.context_store import ContextStore
from agentkv.core.lease_keeper import LeaseKeeper
from agentkv.core.observer import Observer
from agentkv.core.request import Request
from agentkv.engine.contexts import Contexts
from agentkv.engine.detokenizer import PRIMING_TOKENS, Detokenizer
from agentkv.engine.engine_clock import EngineClock
from agentkv.engine.grammar import Grammar, GrammarMatcher
from agentkv.engine.grammar_compiler import GrammarCompiler
from agentkv.engine.operations import Generation, Scoring
from agentkv.engine.request_checks import RequestChecks
from agentkv.engine.request_factory import RequestFactory
from agentkv.engine.step_loop import StepLoop
from agentkv.engine.tokenizer import Tokenizer
from agentkv.engine.tool_format import ToolCall
from agentkv.errors import AgentKVError
from agentkv.sampling_params import SamplingParams


class Inference:
    """Generating and scoring on one engine's contexts.

    Every verb either is refused before anything changed, or returns an `Operation` that steps
    complete.
    """

    def __init__(
        self,
        store: ContextStore,
        observer: Observer,
        leases: LeaseKeeper,
        clock: EngineClock,
        contexts: Contexts,
        *,
        checks: RequestChecks,
        factory: RequestFactory,
        loop: StepLoop,
        tokenizer: Tokenizer,
        grammars: GrammarCompiler,
    ) -> None:
        self._store = store
        self._observer = observer
        self._leases = leases
        self._clock = clock
        self._contexts = contexts
        self._checks = checks
        self._factory = factory
        self._loop = loop
        self._tokenizer = tokenizer
        self._grammars = grammars

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
        self._clock.tick()
        context = self._store.get_idle(tenant, context_id, expected_length)
        ends = self._factory.ends(params)
        self._checks.generation(params, ends, length=context.length)
        self._checks.grammar(params, grammar, context.region)
        self._leases.resume(context, self._clock.now())
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
            As `Contexts.fork` and `generate`.
        """
        self._clock.tick()
        parent = self._store.get(tenant, context_id)
        if at is None or at <= parent.length:  # the fork below refuses a position beyond
            length = parent.length if at is None else at
            self._checks.generation(params, self._factory.ends(params), length=length)
            self._checks.grammar(params, grammar, parent.region_at(length))
        children = self._contexts.branch(parent, count, at, labels or {}, None)
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
        self._clock.tick()
        parent = self._store.get(tenant, context_id)
        self._checks.continuations(continuations, length=parent.length)
        self._leases.resume(parent, self._clock.now())
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

    # -- inside ------------------------------------------------------------------------------

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
        prime = self._store.tree.last_tokens(contexts[0].tail, PRIMING_TOKENS)
        operation = Generation(
            requests,
            [
                Detokenizer(self._tokenizer, prime, params.stop, include_stop=params.include_stop)
                for _ in contexts
            ],
            self._observer.view,
            self._observer.pool,
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
        history = tuple(self._store.tree.tokens(context.tail, region.start, context.length))
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
        text = self._tokenizer.decode(self._store.tokens(context, region.start, None))
        return self._grammars.tool_format.read(text, constraint)
