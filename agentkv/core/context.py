"""What a handle names: a tail segment, a length, how firmly it is kept, and where it came from.

A context knows its place in the tree and in the lineage; it does not know its handle's wire form,
and changes nothing in the tree by itself.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from agentkv.core.bill import Bill
from agentkv.core.lease import Lease, LeaseMode
from agentkv.core.occupancy import Readings
from agentkv.core.rendering import Rendering
from agentkv.core.segment import Hold, Segment

if TYPE_CHECKING:
    from agentkv.core.request import Request


class Region(NamedTuple):
    """The part of a context that a grammar constrains: from `start` to wherever its text ends."""

    grammar: object
    """Opaque here."""
    start: int


@dataclass(slots=True, eq=False)
class Context:
    """One context.

    Invariants: `length` tokens of its path are committed, and more are there only while a request
    extends it; at most one mutating request at a time.
    """

    id: str
    tenant: str
    tail: Segment
    length: int
    """Committed tokens: the public state."""
    hold: Hold
    """How firmly its KV is kept now."""
    lease: Lease
    """For how long, and how firmly, its KV is kept while no request runs on it."""
    create_time: float
    parent: "Context | None" = field(default=None, repr=False)
    """The context it was forked from; stays readable after that one's release."""
    fork_position: int = 0
    ordinal: int = 0
    """Number of its random stream: differs between the children of one fork, and from theirs."""
    depth: int = 0
    root_id: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    children: "dict[Context, None]" = field(default_factory=dict, repr=False)
    """Living contexts forked from it."""
    request: "Request | None" = field(default=None, repr=False)
    """The request that may change it, if any."""
    rendering: Rendering | None = field(default=None, repr=False)
    """What a chat template wrote of it, if anything; forks and truncations keep what they can."""
    region: Region | None = None
    """Where its last constrained generation began, and with what; forks and truncations at or
    beyond that position keep it."""
    is_released: bool = False
    last_used: int = 0
    """Logical time of its last use; orders who gives way."""
    number: int = 0
    """Order of creation among the contexts of a store."""
    is_hidden: bool = False
    """Whether it is a scratch branch that no handle names."""
    has_given_way: bool = False
    """Whether its KV may have gone since the last request on it."""
    use_time: float = 0.0
    """When a caller last used it; its lease and its handle last from then."""
    due_time: float = math.inf
    """When its lease or its handle is looked at next, at the latest."""
    is_claimed: bool = True
    """Whether its creator has, or may have, heard of it."""
    is_warned: bool = False
    """Whether it was said that its lease is about to expire."""
    bill: Bill = field(default_factory=Bill, repr=False)
    """What it has used, but for what it holds since its readings; a hidden one's is its parent's.
    """
    readings: Readings = ()
    """What its path's meters showed when it began to hold it, in each tier where it does."""
    adapter: str = ""
    """Adapter that its tokens are computed with; empty: the model's own weights."""
    is_used: bool = False
    """Whether a request has run on it."""
    num_once_computed: int = 0
    """Leading tokens that had KV at some time: to run them again is to recompute."""

    def rendering_at(self, position: int) -> Rendering | None:
        """Finds what of the template's writing is left at a position."""
        return None if self.rendering is None else self.rendering.at(position)

    def region_at(self, position: int) -> Region | None:
        """Finds the region that a branch forked at a position, or cut to it, is in."""
        if self.region is None or position < self.region.start:
            return None
        return self.region

    @property
    def is_pinned(self) -> bool:
        """Whether its KV never gives way."""
        return self.lease.mode is LeaseMode.PIN

    @property
    def idle_hold(self) -> Hold:
        """How firmly it is kept while no request runs on it."""
        return Hold.TOKENS if self.is_hidden else self.lease.hold

    @property
    def expire_time(self) -> float | None:
        """When its lease expires if it is not used; None once it has expired."""
        return None if self.lease.is_expired else self.use_time + self.lease.ttl
