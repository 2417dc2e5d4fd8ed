"""What there is to see of contexts, bills and the pool, and who watches it.

It reads the store and the tree, and changes nothing in them.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from agentkv.core.bill import Bill
from agentkv.core.block_move import LOWER_TIERS, Tier
from agentkv.core.context import Context
from agentkv.core.context_store import ContextStore
from agentkv.core.pressure import PressureGauge
from agentkv.core.segment import Hold
from agentkv.core.usage_view import UsageView
from agentkv.core.views import ContextPage, ContextView, PoolView, Residency
from agentkv.core.watch import Watcher
from agentkv.errors import AgentKVError, InvalidRequest


class _PathBlocks(NamedTuple):
    private: int
    """Held by this context alone."""
    shared: int
    reclaimable: int
    """Those of both that no running request and no pin holds."""


class Observer:
    """Looks at one store for its tenants; each sees its own contexts, and the pool of all."""

    def __init__(
        self, store: ContextStore, gauge: PressureGauge, tick: Callable[[], None] = lambda: None
    ) -> None:
        """Looks at a store.

        Args:
            store: What is looked at.
            gauge: Keeps the level of pressure.
            tick: Tells the ledger the time.
        """
        self._store = store
        self._tree = store.tree
        self._gauge = gauge
        self._tick = tick
        self._level = self.pool().level
        """The level that those who watch were told last."""

    # -- contexts ----------------------------------------------------------------------------

    def get(self, tenant: str, context_id: str) -> ContextView:
        """Describes one context by its handle.

        Raises:
            NotFound: The handle is unknown.
        """
        return self.view(self._store.get(tenant, context_id))

    def tokens(
        self, tenant: str, context_id: str, start: int = 0, *, limit: int | None = None
    ) -> tuple[int, ...]:
        """Reads the committed tokens of a context in [start, start + limit); default: all.

        Raises:
            NotFound: The handle is unknown.
            InvalidRequest: The context is shorter than `start`.
        """
        return self._store.tokens(self._store.get(tenant, context_id), start, limit)

    def view(self, context: Context) -> ContextView:
        """Describes a context at its committed length."""
        tree = self._tree
        num_computed = min(tree.num_computed(context.tail), context.length)
        num_kept = min(tree.num_kept(context.tail), context.length)
        private, shared, reclaimable = self._num_blocks(context)
        num_away = self._num_away(context)
        parent_id = None if context.parent is None else context.parent.id
        return ContextView(
            id=context.id,
            parent_id=parent_id,
            fork_position=context.fork_position,
            root_id=context.root_id,
            depth=context.depth,
            length=context.length,
            num_computed=num_computed,
            private_blocks=private,
            shared_blocks=shared,
            reclaimable_blocks=reclaimable,
            host_blocks=num_away[Tier.HOST],
            disk_blocks=num_away[Tier.DISK],
            residency=_residency(context.length, num_computed, num_kept, num_away),
            lease=context.lease,
            expire_time=context.expire_time,
            has_head_logits=context.request is None and context.tail in tree.heads,
            is_busy=context.request is not None,
            num_children=len(context.children),
            labels=tuple(context.labels.items()),
            create_time=context.create_time,
            adapter=context.adapter,
        )

    def list(
        self,
        tenant: str,
        *,
        root_id: str | None = None,
        page_size: int = 100,
        page_token: str = "",
    ) -> ContextPage:
        """Lists a tenant's contexts, or those of one tree, parents before their children.

        Raises:
            InvalidRequest: The page token is none that an earlier page carried.
        """
        after = _number_of(page_token)
        listed = [
            context
            for context in self._store
            if context.number > after
            and context.tenant == tenant
            and (root_id is None or context.root_id == root_id)
        ]
        page = listed[:page_size]
        views = tuple(self.view(context) for context in page)
        return ContextPage(views, str(page[-1].number) if len(listed) > page_size else "")

    # -- the pool and the bills --------------------------------------------------------------

    def pool(self) -> PoolView:
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

    def usage(
        self, tenant: str, *, context_id: str | None = None, root_id: str | None = None
    ) -> UsageView:
        """Shows what a context, a tree or else the whole tenant has used until now.

        Raises:
            NotFound: No such context or tree, or another tenant's.
        """
        self._tick()
        store = self._store
        if context_id is not None:
            context = store.get(tenant, context_id)
            hidden = [other for other in store.hidden if other.bill is context.bill]
            return self._usage_view(tenant, store.ledger.of_contexts([context, *hidden]), 1)
        covered = [
            context
            for context in (*store, *store.hidden)
            if context.tenant == tenant and (root_id is None or context.root_id == root_id)
        ]
        if root_id is None:
            bill = store.ledger.of_tenant(tenant, covered)
        else:
            bill = store.ledger.of_tree(tenant, root_id, covered)
        count = sum(not context.is_hidden for context in covered)
        return self._usage_view(tenant, bill, count)

    # -- who watches -------------------------------------------------------------------------

    def watch(self, tenant: str) -> Watcher:
        """Begins to tell a tenant what happens to its contexts, a snapshot first."""
        return self._store.hub.watch(tenant, self._look)

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
            pool = self.pool()
            if pool.level is not self._level:
                self._level = pool.level
                self._store.hub.tell_pressure(pool)
        return [watcher for watcher in watchers if watcher.has_more]

    # -- inside ------------------------------------------------------------------------------

    def _look(self, tenant: str) -> tuple[Sequence[ContextView], PoolView]:
        """Describes all contexts of a tenant, parents before their children, and the pool."""
        contexts = (context for context in self._store if context.tenant == tenant)
        return [self.view(context) for context in contexts], self.pool()

    def _usage_view(self, tenant: str, bill: Bill, num_contexts: int) -> UsageView:
        quotas = self._store.quotas.view(tenant, self._store.num_of(tenant))
        return UsageView(bill, num_contexts, self._store.ledger.tiers(), quotas)

    def _num_blocks(self, context: Context) -> _PathBlocks:
        """Counts the blocks of a path by who else counts on them."""
        private = shared = reclaimable = 0
        is_private, size, segment = True, self._tree.block_size, context.tail
        while segment.parent is not None:
            is_private = is_private and segment.holds[Hold.TOKENS] == 1
            owned = segment.num_owned(size)
            private += owned if is_private else 0
            shared += 0 if is_private else owned
            reclaimable += 0 if segment.holds[Hold.FIRM] else owned
            segment = segment.parent
        return _PathBlocks(private, shared, reclaimable)

    def _num_away(self, context: Context) -> dict[Tier, int]:
        """Counts the blocks of its path in each lower tier; one that a fork cut counts once."""
        places = {place for node in self._tree.path(context.tail) for place in node.away}
        return {tier: sum(place.tier is tier for place in places) for tier in LOWER_TIERS}


def _number_of(page_token: str) -> int:
    """Reads the creation number of the last context of the page before; 0 for the first page."""
    if not page_token:
        return 0
    if not (page_token.isascii() and page_token.isdecimal()):
        raise InvalidRequest(
            "The page token is none this server gave; list from the start.",
            violations={"page_token": "is none the server gave"},
        )
    return int(page_token)


def _residency(
    length: int, num_computed: int, num_kept: int, num_away: Mapping[Tier, int]
) -> Residency:
    """Names where the KV is; the last token of a context that generated has none yet."""
    if num_computed >= length - 1:
        return Residency.DEVICE
    if num_kept >= length - 1:
        return Residency.DISK if num_away[Tier.DISK] else Residency.HOST
    return Residency.PARTIAL if num_kept else Residency.NONE
