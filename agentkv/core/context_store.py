"""All contexts by handle: create, fork, truncate, release.

It owns handles, tenants and lineage. It starts no computation and knows no request beyond the
fact that one may be changing a context. What an observer sees of them is `observer`'s affair.
"""

import itertools
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence

from agentkv.config import LimitsConfig, QuotasConfig
from agentkv.core.bill import Bill
from agentkv.core.context import Context
from agentkv.core.context_tree import ContextTree
from agentkv.core.lease import Lease, LeaseMode
from agentkv.core.ledger import Ledger
from agentkv.core.quotas import Quotas
from agentkv.core.segment import Hold, Segment
from agentkv.core.store_audit import check_store
from agentkv.core.watch import ChangeKind, WatchHub
from agentkv.errors import (
    ContextBusy,
    ContextMoved,
    InvalidRequest,
    NotFound,
    Reason,
)

_ORDINAL_STEP = 1_000_003  # a prime: children of different parents get different streams
_ORDINAL_RANGE = 1 << 64


class ContextStore:
    """The contexts of all tenants.

    Invariants: a context is findable from its creation to its release, by its own tenant alone; a
    foreign handle answers exactly like an unknown one; fork and truncate take no block.
    """

    def __init__(
        self,
        tree: ContextTree,
        limits: LimitsConfig,
        new_id: Callable[[], str],
        quotas: QuotasConfig | None = None,
    ) -> None:
        self.tree = tree
        self.hub = WatchHub()
        """Those who watch, told of whatever happens here."""
        self.ledger = Ledger(tree.residency.occupancies, max_ended_trees=limits.max_ended_trees)
        self.quotas = Quotas(quotas or QuotasConfig(), limits, tree)
        self._limits = limits
        self._new_id = new_id
        self._contexts: dict[str, Context] = {}
        self._num_per_tenant: dict[str, int] = {}
        self.hidden: set[Context] = set()
        """Branches that no handle names."""
        self._numbers = itertools.count(1)

    def __len__(self) -> int:
        return len(self._contexts)

    def __iter__(self) -> Iterator[Context]:
        return iter(self._contexts.values())

    def num_of(self, tenant: str) -> int:
        """Counts the contexts of a tenant."""
        return self._num_per_tenant.get(tenant, 0)

    def get(self, tenant: str, context_id: str) -> Context:
        """Finds a context of this tenant.

        Raises:
            NotFound: The handle is unknown, released or another tenant's.
        """
        context = self._contexts.get(context_id)
        if context is None or context.tenant != tenant:
            raise NotFound(
                "No such context; it may have been released. Create it again from its tokens."
            )
        return context

    def get_idle(self, tenant: str, context_id: str, expected_length: int | None) -> Context:
        """Finds a context that a request may change now.

        Raises:
            NotFound: See `get`.
            ContextBusy: Another request is changing it.
            ContextMoved: It is not at the expected length.
        """
        context = self.get(tenant, context_id)
        if context.request is not None:
            raise ContextBusy(
                "Another request is changing this context; wait for it or cancel it, then try "
                "again."
            )
        if expected_length is not None and expected_length != context.length:
            raise ContextMoved(
                f"The context holds {context.length} tokens, not {expected_length}.",
                metadata={"actual_length": context.length},
            )
        return context

    def create(
        self,
        tenant: str,
        tokens: Sequence[int],
        *,
        lease: Lease,
        labels: Mapping[str, str],
        now: float,
        adapter: str = "",
    ) -> Context:
        """Opens a context with no committed token yet on the longest cached prefix of `tokens`.

        Raises:
            PoolExhausted: The tenant holds as many contexts as it may.
        """
        self._admit(tenant, 1)
        tail, _ = self.tree.open(tenant, array("I", tokens), lease.hold, adapter)
        context = Context(
            self._new_id(), tenant, tail, 0, lease.hold, lease, now, labels=dict(labels)
        )
        context.root_id, context.adapter = context.id, adapter
        self.ledger.begin(context)
        self._add(context, ChangeKind.CREATED)
        return context

    def fork(
        self,
        parent: Context,
        *,
        count: int,
        at: int | None,
        lease: Lease,
        labels: Mapping[str, str],
        now: float,
    ) -> list[Context]:
        """Makes `count` contexts that share all tokens of `parent` before `at`.

        Takes no block, copies nothing, and cannot fail for lack of blocks.

        Raises:
            InvalidRequest: `count` or `at` is out of range.
            PoolExhausted: The tenant may not hold so many contexts, or trees so deep.
        """
        limits = self._limits
        if not 1 <= count <= limits.max_fork_count:
            raise InvalidRequest(
                f"count must be in [1, {limits.max_fork_count}], got {count}.",
                violations={"count": f"must be in [1, {limits.max_fork_count}]"},
            )
        position = parent.length if at is None else at
        _check_position(position, parent.length)
        self.quotas.require_branches(parent.tenant, parent.depth, len(parent.children), count)
        self._admit(parent.tenant, count)
        children = self._branch(parent, count, position, lease.hold, lease, dict(labels), now)
        for child in children:
            parent.children[child] = None
            self._add(child, ChangeKind.FORKED)
        return children

    def fork_hidden(self, parent: Context, count: int) -> list[Context]:
        """Makes branches at the head that no handle names, to be released by the caller.

        They keep no KV of their own while nothing runs on them; what they use is their parent's.
        """
        children = self._branch(
            parent, count, parent.length, Hold.TOKENS, parent.lease, {}, parent.create_time
        )
        for child in children:
            child.is_hidden = True
            child.bill = parent.bill
        self.hidden.update(children)
        return children

    def add_hidden(self, tenant: str, tail: Segment, hold: Hold) -> Context:
        """Takes over an attached tail that no handle names, to be released by the caller."""
        lease = Lease(LeaseMode.RETAIN, 0.0)
        hidden = Context("", tenant, tail, tail.end, hold, lease, 0.0, is_hidden=True)
        self.ledger.begin(hidden)
        self.hidden.add(hidden)
        return hidden

    def require_room(self, tenant: str, count: int, depth: int) -> None:
        """Makes sure that a tenant may have `count` contexts more, of up to such a depth.

        Raises:
            PoolExhausted: It may not.
        """
        self._admit(tenant, count)
        if depth:
            self.quotas.require_branches(tenant, depth - 1, 0, 0)

    def add_restored(
        self,
        tenant: str,
        tail: Segment,
        lease: Lease,
        now: float,
        *,
        parent: Context | None,
        fork_position: int,
        ordinal: int,
        depth: int,
        labels: Mapping[str, str],
    ) -> Context:
        """Makes a context of the path to a tail, with the lineage it had when it was saved."""
        context = Context(
            self._new_id(),
            tenant,
            tail,
            tail.end,
            lease.hold,
            lease,
            now,
            parent,
            fork_position,
            ordinal,
            depth,
            labels=dict(labels),
            readings=self.tree.attach(tail, lease.hold),
            num_once_computed=self.tree.num_computed(tail),
        )
        context.root_id = context.id if parent is None else parent.root_id
        if parent is not None:
            parent.children[context] = None
        self._add(context, ChangeKind.CREATED if parent is None else ChangeKind.FORKED)
        return context

    def tokens(self, context: Context, start: int, limit: int | None) -> tuple[int, ...]:
        """Reads up to `limit` committed tokens of a context from a position on.

        Raises:
            InvalidRequest: The context is shorter than that.
        """
        _check_position(start, context.length)
        end = context.length if limit is None else min(context.length, start + limit)
        return tuple(self.tree.tokens(context.tail, start, end))

    def truncate(self, context: Context, length: int) -> None:
        """Moves an idle context's pointer back to `length` committed tokens.

        Raises:
            InvalidRequest: The context is shorter than that.
        """
        _check_position(length, context.length)
        context.region = context.region_at(length)
        context.rendering = context.rendering_at(length)
        self.ledger.end(context)
        context.tail = self.tree.truncate(context.tail, length, context.hold)
        self.ledger.begin(context)
        context.num_once_computed = min(context.num_once_computed, length)
        if length != context.length:
            self.set_length(context, length)

    def set_length(self, context: Context, length: int) -> None:
        """Commits the tokens of a context's path up to a length, and no more."""
        context.length = length
        self.hub.tell(ChangeKind.RESIZED, context)

    def release(self, context: Context) -> None:
        """Forgets a context; its blocks go where nothing else holds them. Children live on."""
        assert context.request is None and not context.is_released
        self.ledger.end(context)
        self.tree.detach(context.tail, context.hold)
        context.tail = self.tree.root(
            context.tenant, context.adapter
        )  # its children keep it, not its tokens
        context.is_released = True
        if context in self.hidden:
            self.hidden.remove(context)
            if context.parent is None or context.parent.is_released:
                self.ledger.close_hidden(context)
            return
        self.hub.tell(ChangeKind.RELEASED, context)
        self.ledger.close(context)
        for hidden in self.hidden:  # they outlive the bill they shared
            if hidden.parent is context:
                hidden.bill = Bill()
        del self._contexts[context.id]
        self._num_per_tenant[context.tenant] -= 1
        if context.parent is not None:
            context.parent.children.pop(context, None)

    def touch(self, context: Context) -> None:
        """Makes a context the most recently used."""
        context.last_used = self.tree.touch(context.tail)

    def set_hold(self, context: Context, hold: Hold) -> None:
        """Changes how firmly a context's KV is kept."""
        is_moved = (context.hold < Hold.KV) != (hold < Hold.KV)
        if is_moved:
            self.ledger.end(context)
        self.tree.rehold(context.tail, context.hold, hold)
        context.hold = hold
        if is_moved:
            self.ledger.begin(context)

    def set_lease(self, context: Context, lease: Lease) -> None:
        """Gives a context a lease, which its hold follows at once."""
        was_pinned = context.is_pinned
        context.lease = lease
        if lease.hold is Hold.PINNED or context.request is None:
            self.set_hold(context, context.idle_hold)
        elif was_pinned:  # its request goes on as any other does
            self.set_hold(context, Hold.FIRM if context.request.is_running else Hold.KV)

    def give_way(self, context: Context) -> None:
        """Lets a context's KV go as soon as somebody needs the room; its tokens stay."""
        self.set_hold(context, Hold.TOKENS)
        if not context.has_given_way:
            context.has_given_way = True
            self.hub.tell(ChangeKind.EVICTED, context)

    def settle(self, context: Context) -> None:
        """Keeps a context as its lease says once no request runs on it."""
        self.set_hold(context, context.idle_hold)
        self.touch(context)
        if context.has_given_way and self.tree.num_computed(context.tail) >= context.length - 1:
            context.has_given_way = False
            self.hub.tell(ChangeKind.RESTORED, context)

    def check(self) -> None:
        """Asserts that contexts and tree agree."""
        check_store(self)

    def _branch(
        self,
        parent: Context,
        count: int,
        position: int,
        hold: Hold,
        lease: Lease,
        labels: Mapping[str, str],
        now: float,
    ) -> list[Context]:
        tail = self.tree.fork(parent.tail, position)
        readings = self.tree.attach(tail, hold, count)
        first_ordinal = parent.ordinal * _ORDINAL_STEP + 1
        num_once_computed = min(position, parent.num_once_computed)
        return [
            Context(
                self._new_id(),
                parent.tenant,
                tail,
                position,
                hold,
                lease,
                now,
                parent,
                position,
                (first_ordinal + number) % _ORDINAL_RANGE,
                parent.depth + 1,
                parent.root_id,
                labels,
                region=parent.region_at(position),
                rendering=parent.rendering_at(position),
                readings=readings,
                num_once_computed=num_once_computed,
                adapter=parent.adapter,
            )
            for number in range(count)
        ]

    def _admit(self, tenant: str, count: int) -> None:
        self.quotas.require_contexts(tenant, self.num_of(tenant), count)

    def _add(self, context: Context, kind: ChangeKind) -> None:
        context.number = next(self._numbers)
        self.ledger.add(context)
        self._contexts[context.id] = context
        self._num_per_tenant[context.tenant] = self.num_of(context.tenant) + 1
        self.hub.tell(kind, context)


def _check_position(position: int, length: int) -> None:
    if not 0 <= position <= length:
        raise InvalidRequest(
            f"The context holds {length} tokens; position {position} is not in [0, {length}].",
            reason=Reason.POSITION_OUT_OF_RANGE,
            metadata={"actual_length": length},
        )
