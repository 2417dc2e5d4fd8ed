"""What happens to a tenant's contexts, told to those who watch: a snapshot, then changes.

It owns numbering, the bounded buffers and what becomes of a watcher that lags. It decides nothing
about contexts, and costs next to nothing while nobody watches.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from agentkv.core.context import Context
from agentkv.core.lease import Lease
from agentkv.core.views import ContextView, PoolView
from agentkv.errors import AgentKVError

PAGE_SIZE = 500
"""Contexts in one piece of a snapshot."""
MAX_UNREAD = 4096
"""Changes kept for one watcher; one more, and it gets a fresh snapshot in their place."""


class ChangeKind(StrEnum):
    """What happened to a context."""

    CREATED = "created"
    FORKED = "forked"
    RELEASED = "released"
    """By its owner, or because nobody used it for the handle retention."""
    RESIZED = "resized"
    """Its committed length changed."""
    LEASED = "leased"
    """Its lease is another one."""
    EXPIRING = "expiring"
    """Its lease expires soon unless it is used."""
    EXPIRED = "expired"
    """Its lease expired: its KV is the first to go, its tokens stay."""
    EVICTED = "evicted"
    """It gave way: its KV may be gone, and is recomputed by the next use."""
    PARKED = "parked"
    """A tool runs: its KV may leave the device."""
    RESTORED = "restored"
    """All of its KV is on the device again."""


@dataclass(frozen=True, slots=True)
class Change:
    """One thing that happened to one context, and how the context was just after it."""

    kind: ChangeKind
    context_id: str
    parent_id: str | None
    root_id: str
    fork_position: int
    length: int
    """Committed tokens."""
    lease: Lease
    expire_time: float | None
    """When the lease expires unless the context is used; None once it has."""
    sequence: int = 0
    """Place among the updates of one watcher: they begin at 1 and leave no gap."""


@dataclass(frozen=True, slots=True)
class PoolChange:
    """Pressure moved to another level."""

    pool: PoolView
    sequence: int = 0


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A piece of everything as it is: replaces what the watcher knew."""

    contexts: tuple[ContextView, ...]
    pool: PoolView
    is_first: bool
    is_last: bool
    sequence: int = 0


WatchUpdate = Change | PoolChange | Snapshot
Look = Callable[[str], tuple[Sequence[ContextView], PoolView]]
"""Describes all contexts of a tenant, and the pool."""


class Watcher:
    """One who watches a tenant's contexts.

    Invariants: its updates are numbered without a gap; at most `MAX_UNREAD` changes are kept; a
    change is told after the snapshot that does not show it yet, and never before.
    """

    def __init__(self, tenant: str, look: Look) -> None:
        self.tenant = tenant
        self.error: AgentKVError | None = None
        self.is_done = False
        self._look = look
        self._is_behind = True
        self._pages: list[Snapshot] = []
        self._changes: list[Change | PoolChange] = []
        self._resized: dict[str, int] = {}
        """Where among the changes a context's last new length stands."""
        self._sequence = 0

    @property
    def has_more(self) -> bool:
        """Whether there is something to take."""
        return not self.is_done and bool(self._is_behind or self._pages or self._changes)

    def add(self, change: Change | PoolChange) -> None:
        """Keeps a change until it is taken; the last of many lengths stands for all."""
        if self._is_behind:
            return  # the snapshot to come will show it
        if isinstance(change, Change):
            if change.kind is ChangeKind.RESIZED and change.context_id in self._resized:
                self._changes[self._resized[change.context_id]] = change
                return
            self._resized.pop(change.context_id, None)  # lengths are not told across other news
            if change.kind is ChangeKind.RESIZED:
                self._resized[change.context_id] = len(self._changes)
        self._changes.append(change)
        if len(self._changes) > MAX_UNREAD:
            self._is_behind = True

    def take_news(self) -> tuple[WatchUpdate, ...]:
        """Takes what is next: a piece of a snapshot, or all changes since."""
        if self._is_behind:
            self._is_behind = False
            self._drop_changes()
            self._pages = self._snapshot()
        if self._pages:
            return (self._numbered(self._pages.pop(0)),)
        changes = tuple(self._numbered(change) for change in self._changes)
        self._drop_changes()
        return changes

    def _drop_changes(self) -> None:
        self._changes, self._resized = [], {}

    def _snapshot(self) -> list[Snapshot]:
        views, pool = self._look(self.tenant)
        starts = range(0, max(len(views), 1), PAGE_SIZE)
        return [
            Snapshot(
                tuple(views[start : start + PAGE_SIZE]),
                pool,
                is_first=start == 0,
                is_last=start + PAGE_SIZE >= len(views),
            )
            for start in starts
        ]

    def _numbered(self, update: WatchUpdate) -> WatchUpdate:
        self._sequence += 1
        return replace(update, sequence=self._sequence)


class WatchHub:
    """All watchers of an engine."""

    def __init__(self) -> None:
        self.watchers: dict[Watcher, None] = {}

    def watch(self, tenant: str, look: Look) -> Watcher:
        """Adds a watcher, whose first update is a snapshot."""
        watcher = Watcher(tenant, look)
        self.watchers[watcher] = None
        return watcher

    def leave(self, watcher: Watcher) -> None:
        """Forgets a watcher; one that is gone already is passed over."""
        watcher.is_done = True
        self.watchers.pop(watcher, None)

    def tell(self, kind: ChangeKind, context: Context) -> None:
        """Tells a context's own tenant what happened to it."""
        if not self.watchers or context.is_hidden:
            return
        change = Change(
            kind,
            context.id,
            None if context.parent is None else context.parent.id,
            context.root_id,
            context.fork_position,
            context.length,
            context.lease,
            context.expire_time,
        )
        for watcher in self.watchers:
            if watcher.tenant == context.tenant:
                watcher.add(change)

    def tell_pressure(self, pool: PoolView) -> None:
        """Tells everybody that pressure moved to another level."""
        for watcher in self.watchers:
            watcher.add(PoolChange(pool))
