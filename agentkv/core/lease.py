"""For how long, and how firmly, a context's KV is kept: what is asked for and what is granted.

Values only. Who may have which lease, and when one ends, is `lease_keeper`'s affair; what a hold
means for eviction is `residency`'s and `admission`'s.
"""

from dataclasses import dataclass
from enum import StrEnum

from agentkv.core.segment import Hold


class LeaseMode(StrEnum):
    """How firmly KV is kept while no request runs on the context."""

    RETAIN = "retain"
    """While there is room: gives way to requests, least recently used first."""
    PIN = "pin"
    """Whatever the pressure, against a quota."""
    PARK = "park"
    """A tool is running: gives way before what is retained, and comes back with the next use."""
    DROPPABLE = "droppable"
    """Not counted on: the first to give way."""


class LeaseReduction(StrEnum):
    """Why less was granted than asked for."""

    PIN_QUOTA = "pin_quota"
    """The tenant's pins are used up: the context is retained, not pinned."""
    MAX_TTL = "max_ttl"
    """The time asked for is above the limit: it is granted up to the limit."""


@dataclass(frozen=True, slots=True)
class LeaseTerms:
    """What a caller asks for."""

    mode: LeaseMode | None = None
    """None leaves it as it is; RETAIN for a new context."""
    ttl: float | None = None
    """Seconds without use after which the lease expires; None takes the server's default."""
    may_reduce: bool = False
    """Whether less is fine: without it, what cannot be granted is refused."""


DEFAULT_TERMS = LeaseTerms()
"""RETAIN for the default time; for a context that exists, the lease it has, renewed."""


@dataclass(frozen=True, slots=True)
class Lease:
    """What was granted. A lease that expired is DROPPABLE until the next use of the context."""

    mode: LeaseMode
    ttl: float
    """Seconds without use after which it expires."""
    reductions: tuple[LeaseReduction, ...] = ()
    """Why it is less than was asked for; empty when it is all."""
    is_expired: bool = False

    @property
    def hold(self) -> Hold:
        """How firmly the KV is held while the context is idle."""
        return Hold.PINNED if self.mode is LeaseMode.PIN else Hold.KV

    @property
    def firmness(self) -> int:
        """Orders who gives way among idle contexts: the lowest goes first."""
        return _FIRMNESS.index(self.mode)


_FIRMNESS = (LeaseMode.DROPPABLE, LeaseMode.PARK, LeaseMode.RETAIN, LeaseMode.PIN)
