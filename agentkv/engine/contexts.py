"""Verbs that make contexts, give or take tokens, renew leases, and forget contexts.

Given tokens are queued to be computed; nothing is sampled here. What there is to see of contexts
is `core.observer`'s affair.
"""

from collections.abc import Mapping, Sequence

from agentkv.core.context import Context
from agentkv.core.context_store import ContextStore
from agentkv.core.lease import DEFAULT_TERMS, LeaseTerms
from agentkv.core.lease_keeper import LeaseKeeper
from agentkv.core.lineage import descendants
from agentkv.core.observer import Observer
from agentkv.core.rendering import Rendering
from agentkv.core.reply_table import ReplyTable
from agentkv.core.segment import Hold
from agentkv.core.views import ContextView
from agentkv.engine.conversation import Conversation
from agentkv.engine.engine_clock import EngineClock
from agentkv.engine.operations import Commit, Operation
from agentkv.engine.outputs import ChatState, Leased, Released
from agentkv.engine.request_checks import RequestChecks
from agentkv.engine.request_factory import RequestFactory
from agentkv.engine.step_loop import StepLoop
from agentkv.errors import AgentKVError, InvalidRequest, NotFound, Reason


class Contexts:
    """The contexts of one engine, as its callers change them.

    Every verb either is refused before anything changed, or is done, or returns a `Commit` that
    steps complete.
    """

    def __init__(
        self,
        store: ContextStore,
        observer: Observer,
        leases: LeaseKeeper,
        clock: EngineClock,
        replies: ReplyTable,
        *,
        checks: RequestChecks,
        factory: RequestFactory,
        loop: StepLoop,
    ) -> None:
        self.num_forks = 0
        """Contexts made by forking, since start."""
        self._store = store
        self._observer = observer
        self._leases = leases
        self._clock = clock
        self._replies = replies
        self._checks = checks
        self._factory = factory
        self._loop = loop

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
        self._clock.tick()
        now = self._clock.now()
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
            self._observer.view,
            self._observer.pool,
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
        self._clock.tick()
        body = (context_id, count, at, lease, tuple((labels or {}).items()))
        known = self._replies.find(tenant, "Fork", request_id, body, self._clock.now())
        if isinstance(known, tuple):
            return known
        parent = self._store.get(tenant, context_id)
        children = self.branch(parent, count, at, labels or {}, lease)
        views = tuple(self._observer.view(child) for child in children)
        self._replies.record(tenant, "Fork", request_id, body, views, self._clock.now())
        return views

    def branch(
        self,
        parent: Context,
        count: int,
        at: int | None,
        labels: Mapping[str, str],
        terms: LeaseTerms | None,
    ) -> Sequence[Context]:
        """Forks a context for a verb of the engine, which has told the ledger the time.

        Raises:
            InvalidRequest, PoolExhausted: See `fork`.
        """
        now = self._clock.now()
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
        self.num_forks += count
        return children

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
        self._clock.tick()
        context = self._store.get_idle(tenant, context_id, expected_length)
        self._checks.tokens(token_ids, length=context.length)
        self._leases.resume(context, self._clock.now())
        head = self._store.tree.heads.get(context.tail)
        requests = []
        if token_ids:
            requests.append(self._factory.extension(context, token_ids, with_logprobs=logprobs))
            if chat is not None:
                end = context.length + len(token_ids)
                requests[0].rendering = Rendering(chat, end, context.rendering)
        operation = Commit(context, requests, self._observer.view, self._observer.pool)
        try:
            self._leases.check_pins([context])
            self._loop.submit(operation)
        except AgentKVError:
            self._store.truncate(context, context.length)
            if head is not None:  # appending dropped it
                self._store.tree.heads.keep(context.tail, head)
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
        self._clock.tick()
        context = self._store.get_idle(tenant, context_id, expected_length)
        self._store.truncate(context, length)
        self._leases.touch(context, self._clock.now())
        return self._observer.view(context)

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
        self._clock.tick()
        context = self._store.get(tenant, context_id)
        contexts = descendants(context) if recursive else [context]
        self._leases.update(contexts, terms, self._clock.now())
        for leased in contexts:
            self._loop.scheduler.park_if_leased(leased)
        return Leased(self._observer.view(context), len(contexts), self._observer.pool())

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
        self._clock.tick()
        doomed: dict[Context, None] = {}
        for context_id in context_ids:
            try:
                context = self._store.get(tenant, context_id)
            except NotFound:
                if not allow_missing:
                    raise
                continue
            found = descendants(context) if recursive else [context]
            doomed.update(dict.fromkeys(found))
        live_before = self._store.tree.residency.held[Hold.KV]
        ended: dict[Operation, None] = {}
        for context in doomed:
            if context.request is not None:
                ended[self._loop.end_released(context.request)] = None
            if not context.is_released:
                self._store.release(context)
        freed = live_before - self._store.tree.residency.held[Hold.KV]
        return Released(len(doomed), freed, self._observer.pool()), tuple(ended)
