"""Who has which lease: granting, quotas, expiry, and how long a handle lives without use.

It changes leases and tells watchers. Time is an argument. It does not decide who gives way under
pressure (`admission`), and releases nothing itself.
"""

import heapq
import itertools
import math
from collections.abc import Sequence

from agentkv.config import LeaseConfig
from agentkv.core.context import Context
from agentkv.core.context_store import ContextStore
from agentkv.core.lease import Lease, LeaseMode, LeaseReduction, LeaseTerms
from agentkv.core.segment import Hold
from agentkv.core.watch import ChangeKind, WatchHub
from agentkv.errors import InvalidRequest, PoolExhausted, Reason


class LeaseKeeper:
    """The leases of a store's contexts.

    Invariants: what a tenant pins is within its quota whenever none of its requests runs; every
    context that was admitted is looked at when its lease is to be warned of, expires, or its
    handle has not been used for the retention.
    """

    def __init__(self, store: ContextStore, hub: WatchHub, config: LeaseConfig) -> None:
        self._store = store
        self._hub = hub
        self._config = config
        self._due: list[tuple[float, int, Context]] = []
        self._entries = itertools.count()

    # -- granting ----------------------------------------------------------------------------

    def propose(self, terms: LeaseTerms, current: Lease | None = None) -> Lease:
        """Says what the terms come to before it is known what a pin would take.

        Args:
            terms: What is asked for.
            current: The lease it replaces; None for a context to be made.

        Raises:
            InvalidRequest: The time is not positive and finite, or above the limit and not to be
                reduced.
        """
        is_new = current is None or current.is_expired
        if current is not None and not is_new and terms.mode is None and terms.ttl is None:
            return current
        mode = terms.mode or (LeaseMode.RETAIN if current is None or is_new else current.mode)
        if terms.ttl is None:
            return Lease(mode, self._config.default_ttl)
        longest = self._config.max_ttl
        if not (math.isfinite(terms.ttl) and terms.ttl > 0):
            raise _bad_ttl(f"must be finite and above 0, got {terms.ttl:g}")
        if terms.ttl <= longest:
            return Lease(mode, terms.ttl)
        if not terms.may_reduce:
            raise _bad_ttl(f"must be at most {longest:g} s, got {terms.ttl:g}")
        return Lease(mode, longest, (LeaseReduction.MAX_TTL,))

    def inherited(self, parent: Context, terms: LeaseTerms | None) -> Lease:
        """Says what lease the branches of a context get: its own, unless other terms are named."""
        mine = Lease(_mode_after(parent.lease), parent.lease.ttl)
        return mine if terms is None else self.propose(terms, mine)

    def check_pins(self, contexts: Sequence[Context], *, may_reduce: bool = False) -> None:
        """Makes sure that a tenant's pins are within its quota, those of these contexts included.

        Args:
            contexts: Contexts of one tenant that were pinned, or have grown.
            may_reduce: Whether they are retained instead where the quota does not allow the pins.

        Raises:
            PoolExhausted: They are not. The leases are the caller's to take back.
        """
        pinned = [context for context in contexts if context.is_pinned]
        if not pinned or (error := self._pin_error(pinned[0].tenant)) is None:
            return
        if not may_reduce:
            raise error
        for context in pinned:
            self._reduce(context)

    def trim_pin(self, context: Context) -> None:
        """Lets a pinned context that a token took beyond the quota be retained, and says so."""
        has_new_block = context.length % self._store.tree.block_size <= 1
        if context.is_released or not (context.is_pinned and has_new_block):
            return
        if self._pin_error(context.tenant) is not None:
            self._reduce(context)
            self._hub.tell(ChangeKind.LEASED, context)

    def update(self, contexts: Sequence[Context], terms: LeaseTerms, now: float) -> None:
        """Gives contexts of one tenant new leases, all or none; that is a use of each.

        Raises:
            InvalidRequest: See `propose`.
            PoolExhausted: The pins would exceed the quota and are not to be reduced.
        """
        before = [context.lease for context in contexts]
        holds = [context.hold for context in contexts]
        proposed = [self.propose(terms, lease) for lease in before]
        for context, lease in zip(contexts, proposed, strict=True):
            self._store.set_lease(context, lease)
        try:
            self.check_pins(contexts, may_reduce=terms.may_reduce)
        except PoolExhausted:
            for context, lease, hold in zip(contexts, before, holds, strict=True):
                self._store.set_lease(context, lease)
                self._store.set_hold(context, hold)  # what is parked, or gave way, stays so
            raise
        for context, lease in zip(contexts, before, strict=True):
            self.touch(context, now)
            self._schedule(context)
            if context.lease != lease:
                is_parked = context.lease.mode is LeaseMode.PARK
                self._hub.tell(ChangeKind.PARKED if is_parked else ChangeKind.LEASED, context)

    # -- use ---------------------------------------------------------------------------------

    def admit(self, context: Context) -> None:
        """Begins to watch over a new context."""
        self._schedule(context)

    def touch(self, context: Context, now: float) -> None:
        """Renews a lease, and the life of the handle, by use."""
        context.use_time, context.is_claimed, context.is_warned = now, True, False

    def resume(self, context: Context, now: float) -> None:
        """Renews a lease by a use that needs the KV: what was parked or expired is retained."""
        self.touch(context, now)
        lease = context.lease
        if lease.is_expired or lease.mode is LeaseMode.PARK:
            ttl = self._config.default_ttl if lease.is_expired else lease.ttl
            self._store.set_lease(context, Lease(_mode_after(lease), ttl))
            self._schedule(context)
            self._hub.tell(ChangeKind.LEASED, context)

    def disown(self, context: Context) -> None:
        """Notes that nobody heard of a new context: it goes soon unless somebody uses it."""
        context.is_claimed = False
        self._schedule(context)

    # -- time --------------------------------------------------------------------------------

    @property
    def next_due(self) -> float | None:
        """When something is to be done next, at the earliest; None when nothing is."""
        return self._due[0][0] if self._due else None

    def advance(self, now: float) -> list[Context]:
        """Warns of leases, lets them expire, and returns the contexts that are to be released."""
        abandoned = []
        while self._due and self._due[0][0] <= now:
            due, _, context = heapq.heappop(self._due)
            if context.is_released or due != context.due_time:
                continue  # it has an earlier entry, or needs none
            context.due_time = math.inf
            if context.request is not None:
                self.touch(context, now)  # what runs is in use
            if now >= self._release_time(context):
                abandoned.append(context)
                continue
            self._age(context, now)
            self._schedule(context)
        return abandoned

    # -- inside ------------------------------------------------------------------------------

    def _age(self, context: Context, now: float) -> None:
        expire_time = context.expire_time
        if expire_time is None:
            return
        if now >= expire_time:
            lease = Lease(LeaseMode.DROPPABLE, context.lease.ttl, is_expired=True)
            self._store.set_lease(context, lease)
            self._hub.tell(ChangeKind.EXPIRED, context)
        elif now >= expire_time - self._config.warning and not context.is_warned:
            context.is_warned = True
            self._hub.tell(ChangeKind.EXPIRING, context)

    def _schedule(self, context: Context) -> None:
        """Notes when a context is to be looked at again.

        A use moves that back, and leaves the note: who is looked at too early is noted anew.
        """
        times = [self._release_time(context)]
        if context.expire_time is not None:
            warning = 0.0 if context.is_warned else self._config.warning
            times.append(context.expire_time - warning)
            if warning and times[-1] <= context.use_time:  # a lease shorter than the warning
                times[-1] = context.expire_time
        due = min(times)
        if due < context.due_time:
            context.due_time = due
            heapq.heappush(self._due, (due, next(self._entries), context))

    def _release_time(self, context: Context) -> float:
        config = self._config
        retention = config.handle_retention if context.is_claimed else config.unclaimed_retention
        return context.use_time + retention

    def _reduce(self, context: Context) -> None:
        lease = context.lease
        reductions = (*lease.reductions, LeaseReduction.PIN_QUOTA)
        self._store.set_lease(context, Lease(LeaseMode.RETAIN, lease.ttl, reductions))

    def _pin_error(self, tenant: str) -> PoolExhausted | None:
        tree = self._store.tree
        quota = self._config.max_pinned(tree.pool.num_blocks)
        if quota == tree.pool.num_blocks:
            return None  # the pool itself is the limit, and says so
        need = tree.num_blocks_at(tenant, Hold.PINNED)
        if need <= quota:
            return None
        return PoolExhausted(
            f"{need} blocks would be pinned, and {quota} may be. Unpin or release contexts, or "
            "ask for RETAIN.",
            reason=Reason.TENANT_QUOTA,
            metadata={
                "quota": "pins",
                "need": need,
                "limit": quota,
                "free": tree.pool.num_free,
            },
        )


def _mode_after(lease: Lease) -> LeaseMode:
    """Says which mode a lease goes on with: a pause or an expiry is not for ever."""
    is_over = lease.is_expired or lease.mode is LeaseMode.PARK
    return LeaseMode.RETAIN if is_over else lease.mode


def _bad_ttl(what: str) -> InvalidRequest:
    return InvalidRequest(f"The lease's ttl {what}.", violations={"lease.ttl": what})
