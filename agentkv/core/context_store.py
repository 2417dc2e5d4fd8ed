"""All contexts by handle: create, fork, truncate, release, and what an observer sees.

It owns handles, tenants and lineage. It starts no computation and knows no request beyond the
fact that one may be changing a context.
"""

import itertools
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from agentkv.config import LimitsConfig
from agentkv.core.context import Context
from agentkv.core.context_tree import ContextTree
from agentkv.core.segment import Hold
from agentkv.core.views import ContextView, Residency
from agentkv.errors import (
    ContextBusy,
    ContextMoved,
    InvalidRequest,
    NotFound,
    PoolExhausted,
    Reason,
)

_ORDINAL_STEP = 1_000_003  # a prime: children of different parents get different streams
_ORDINAL_RANGE = 1 << 64


class ContextPage(NamedTuple):
    """Part of a list."""

    contexts: tuple[ContextView, ...]
    next_page_token: str
    """Continues the list; empty at its end."""


class ContextStore:
    """The contexts of all tenants.

    Invariants: a context is findable from its creation to its release, by its own tenant alone; a
    foreign handle answers exactly like an unknown one; fork and truncate take no block.
    """

    def __init__(self, tree: ContextTree, limits: LimitsConfig, new_id: Callable[[], str]) -> None:
        self.tree = tree
        self._limits = limits
        self._new_id = new_id
        self._contexts: dict[str, Context] = {}
        self._num_per_tenant: dict[str, int] = {}
        self._hidden: set[Context] = set()
        self._numbers = itertools.count(1)

    def __len__(self) -> int:
        return len(self._contexts)

    def __iter__(self) -> Iterator[Context]:
        return iter(self._contexts.values())

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
        pinned: bool,
        labels: Mapping[str, str],
        now: float,
    ) -> Context:
        """Opens a context with no committed token yet on the longest cached prefix of `tokens`.

        Raises:
            PoolExhausted: The tenant holds as many contexts as it may.
        """
        self._admit(tenant, 1)
        hold = Hold.PINNED if pinned else Hold.KV
        tail, _ = self.tree.open(tenant, array("I", tokens), hold)
        context = Context(self._new_id(), tenant, tail, 0, hold, hold, now, labels=dict(labels))
        context.root_id = context.id
        self._add(context)
        return context

    def fork(
        self,
        parent: Context,
        *,
        count: int,
        at: int | None,
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
        if parent.depth >= limits.max_depth:
            raise PoolExhausted(
                f"A context may descend from at most {limits.max_depth} forks.",
                reason=Reason.TENANT_QUOTA,
                metadata={"quota": "depth", "limit": limits.max_depth},
            )
        self._admit(parent.tenant, count)
        children = self._branch(parent, count, position, parent.idle_hold, dict(labels), now)
        for child in children:
            parent.children[child] = None
            self._add(child)
        return children

    def fork_hidden(self, parent: Context, count: int) -> list[Context]:
        """Makes branches at the head that no handle names, to be released by the caller.

        They keep no KV of their own while nothing runs on them.
        """
        children = self._branch(parent, count, parent.length, Hold.TOKENS, {}, parent.create_time)
        self._hidden.update(children)
        return children

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
        context.tail = self.tree.truncate(context.tail, length, context.hold)
        context.length = length

    def release(self, context: Context) -> None:
        """Forgets a context; its blocks go where nothing else holds them. Children live on."""
        assert context.request is None and not context.is_released
        self.tree.detach(context.tail, context.hold)
        context.tail = self.tree.root(context.tenant)  # its children keep it, not its tokens
        context.is_released = True
        if context in self._hidden:
            self._hidden.remove(context)
            return
        del self._contexts[context.id]
        self._num_per_tenant[context.tenant] -= 1
        if context.parent is not None:
            context.parent.children.pop(context, None)

    def descendants(self, context: Context) -> list[Context]:
        """Lists a context and all living contexts forked from it, children before parents."""
        found = [context]
        for node in found:
            found.extend(node.children)
        return found[::-1]

    def touch(self, context: Context) -> None:
        """Makes a context the most recently used."""
        context.last_used = self.tree.touch(context.tail)

    def set_hold(self, context: Context, hold: Hold) -> None:
        """Changes how firmly a context's KV is kept."""
        self.tree.rehold(context.tail, context.hold, hold)
        context.hold = hold

    def view(self, context: Context) -> ContextView:
        """Describes a context at its committed length."""
        tree = self.tree
        num_computed = min(tree.num_computed(context.tail), context.length)
        private, shared = self._num_blocks(context)
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
            residency=_residency(num_computed, context.length),
            pinned=context.is_pinned,
            has_head_logits=context.request is None and context.tail in tree.heads,
            is_busy=context.request is not None,
            num_children=len(context.children),
            labels=tuple(context.labels.items()),
            create_time=context.create_time,
        )

    def page(
        self, tenant: str, *, root_id: str | None, page_size: int, page_token: str
    ) -> ContextPage:
        """Lists a tenant's contexts, or those of one tree, parents before their children.

        Raises:
            InvalidRequest: The page token is none that an earlier page carried.
        """
        after = _number_of(page_token)
        listed = [
            context
            for context in self
            if context.number > after
            and context.tenant == tenant
            and (root_id is None or context.root_id == root_id)
        ]
        page = listed[:page_size]
        views = tuple(self.view(context) for context in page)
        return ContextPage(views, str(page[-1].number) if len(listed) > page_size else "")

    def check(self) -> None:
        """Asserts that contexts and tree agree."""
        tails: dict[object, int] = {}
        for context in (*self, *self._hidden):
            assert not context.is_released
            assert context.length <= context.tail.end
            assert context.request is not None or context.length == context.tail.end
            tails[context.tail] = tails.get(context.tail, 0) + 1
        for segment in self.tree:
            assert segment.num_contexts == tails.get(segment, 0), "a tail is miscounted"
        self.tree.check()

    def _branch(
        self,
        parent: Context,
        count: int,
        position: int,
        hold: Hold,
        labels: Mapping[str, str],
        now: float,
    ) -> list[Context]:
        tail = self.tree.fork(parent.tail, position)
        self.tree.attach(tail, hold, count)
        first_ordinal = parent.ordinal * _ORDINAL_STEP + 1
        return [
            Context(
                self._new_id(),
                parent.tenant,
                tail,
                position,
                hold,
                hold,
                now,
                parent,
                position,
                (first_ordinal + number) % _ORDINAL_RANGE,
                parent.depth + 1,
                parent.root_id,
                labels,
                region=parent.region_at(position),
            )
            for number in range(count)
        ]

    def _num_blocks(self, context: Context) -> tuple[int, int]:
        """Counts the blocks that only this context holds, and the others of its path."""
        private = shared = 0
        is_private = True
        for segment in reversed(self.tree.path(context.tail)):
            is_private = is_private and segment.holds[Hold.TOKENS] == 1
            owned = segment.num_owned(self.tree.block_size)
            private += owned if is_private else 0
            shared += 0 if is_private else owned
        return private, shared

    def _admit(self, tenant: str, count: int) -> None:
        held, limit = self._num_per_tenant.get(tenant, 0), self._limits.max_contexts
        if held + count > limit:
            raise PoolExhausted(
                f"{count} more contexts would exceed the limit of {limit}; {held} are held. "
                "Release some first.",
                reason=Reason.TENANT_QUOTA,
                metadata={"quota": "contexts", "limit": limit, "held": held, "need": count},
            )

    def _add(self, context: Context) -> None:
        context.number = next(self._numbers)
        self._contexts[context.id] = context
        self._num_per_tenant[context.tenant] = self._num_per_tenant.get(context.tenant, 0) + 1


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


def _check_position(position: int, length: int) -> None:
    if not 0 <= position <= length:
        raise InvalidRequest(
            f"The context holds {length} tokens; position {position} is not in [0, {length}].",
            reason=Reason.POSITION_OUT_OF_RANGE,
            metadata={"actual_length": length},
        )


def _residency(num_computed: int, length: int) -> Residency:
    """Names where the KV is; the last token of a context that generated has none yet."""
    if num_computed >= length - 1:
        return Residency.DEVICE
    return Residency.PARTIAL if num_computed else Residency.NONE
