"""What a watcher is told: frozen values, named as on the wire."""

from dataclasses import dataclass
from enum import StrEnum

from agentkv.client.values import ContextInfo, LeaseInfo, PoolInfo


class ChangeKind(StrEnum):
    """What happened to a context."""

    UNKNOWN = "unknown"
    """A newer server names something this client does not know."""
    CREATED = "created"
    """It was made; its first tokens are committed by and by."""
    FORKED = "forked"
    RELEASED = "released"
    """By its owner, or because nobody used it for the handle retention."""
    RESIZED = "resized"
    """Its length changed."""
    LEASED = "leased"
    """It has another lease."""
    EXPIRING = "expiring"
    """Its lease expires soon unless it is used."""
    EXPIRED = "expired"
    """Its lease expired: its KV is the first to go, its tokens stay."""
    EVICTED = "evicted"
    """It gave way: its KV may be gone, and is computed again by the next use."""
    PARKED = "parked"
    RESTORED = "restored"
    """All of its KV is on the device again."""


@dataclass(frozen=True, slots=True)
class WatchSnapshot:
    """Everything as it is: replaces what the watcher knew."""

    sequence: int
    """Number of the event in its stream, from 1 on. A snapshot has that of its last piece."""
    contexts: tuple[ContextInfo, ...]
    """Parents before their children."""
    pool: PoolInfo


@dataclass(frozen=True, slots=True)
class ContextChange:
    """Something that happened to a context, and how the context was just after it."""

    sequence: int
    kind: ChangeKind
    context_id: str
    parent_id: str | None
    """The context it was forked from; None for a created one."""
    root_id: str
    fork_position: int
    length: int
    """Committed tokens."""
    lease: LeaseInfo


@dataclass(frozen=True, slots=True)
class PressureChange:
    """Pressure moved to another level."""

    sequence: int
    pool: PoolInfo


WatchEvent = WatchSnapshot | ContextChange | PressureChange
