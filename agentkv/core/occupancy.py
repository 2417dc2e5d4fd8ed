"""Who pays for the blocks of one tier, and for how long: block-seconds, split among holders.

A context holds a block while its path runs through it and it is kept at the tier's level. A block
that n contexts hold costs each of them 1/n of a block-second per second; what no context holds is
charged to the pool. This file owns the words and the sums by tenant; which block is whose is the
affair of `device_occupancy` and `away_occupancy`. It knows segments and time as it is told, and
neither contexts nor tenants.

    Meters hold two integrals each: `share`, of blocks / holders, and `alone`, of blocks. A
    context's bill is the sum along its path now, less that sum when it began to hold. A meter is
    brought up to date only when its blocks or holders change, so time costs nothing by itself,
    and a fork costs one addition per segment of its path. Where a segment is cut, joined or hung
    elsewhere, meters are rewritten such that no sum along a path changes.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from agentkv.core.block_move import Tier
from agentkv.core.block_pool import BlockPool
from agentkv.core.segment import Hold, Segment
from agentkv.core.sliding_sum import SlidingSum


class Reading(NamedTuple):
    """Sums along a path at some time; the difference of two is what was used between them."""

    share: float
    """Block-seconds, each block's split among its holders."""
    alone: float
    """Block-seconds one holder of the path would have used if nothing had been shared."""

    def since(self, earlier: "Reading") -> "Reading":
        """Takes the difference to an earlier reading of the same context."""
        return Reading(self.share - earlier.share, self.alone - earlier.alone)


Readings: TypeAlias = tuple[tuple[Tier, Reading], ...]
"""One in each tier where something is held."""


@dataclass(slots=True)
class Tenancy:
    """What is held below one root, and its integral; exact whatever the contexts do."""

    num_blocks: int = 0
    """Blocks held now, each counted once."""
    block_seconds: float = 0.0
    """Integral of `num_blocks` up to `at`."""
    at: float = 0.0
    window: SlidingSum | None = None
    """The same of the last seconds alone, where a quota asks for it."""


@dataclass(slots=True)
class Meter:
    """What some contexts hold together: rates since `at`, integrals up to it."""

    tenancy: Tenancy
    at: float
    num_holders: int = 0
    num_blocks: int = 0
    share: float = 0.0
    alone: float = 0.0

    def settle(self, now: float) -> None:
        """Brings the integrals up to date."""
        if now != self.at:
            used = self.num_blocks * (now - self.at)
            self.share += used / self.num_holders
            self.alone += used
            self.at = now


class Occupancy(ABC):
    """Block-seconds of one tier; what tenancies and pool are charged adds up to what is taken."""

    def __init__(self, tier: Tier, pool: BlockPool, level: Hold) -> None:
        self.tier = tier
        self.level = level
        """Contexts kept at this level or above hold what is on their path."""
        self.now = 0.0
        self.taken_block_seconds = 0.0
        """Integral of the blocks taken from the pool, held or not."""
        self._pool = pool
        self._tenancies: dict[Segment, Tenancy] = {}

    def advance(self, now: float) -> None:
        """Moves time on; what changes next changes at this time. Time does not run backwards."""
        if now > self.now:
            taken = self._pool.num_blocks - self._pool.num_free
            self.taken_block_seconds += taken * (now - self.now)
            self.now = now

    def tenancy(self, root: Segment) -> Tenancy:
        """Finds what is held below a root, up to date."""
        tenancy = self._tenancies.get(root)
        if tenancy is None:
            tenancy = self._tenancies[root] = Tenancy(at=self.now)
        self._settle(tenancy)
        return tenancy

    @property
    def held_block_seconds(self) -> float:
        """Block-seconds charged to contexts since start."""
        return sum(self.tenancy(root).block_seconds for root in self._tenancies)

    @property
    def unheld_block_seconds(self) -> float:
        """Block-seconds charged to the pool since start: cache, and KV that gave way."""
        return self.taken_block_seconds - self.held_block_seconds

    @abstractmethod
    def read(self, tail: Segment) -> Reading:
        """Sums up a path."""

    # -- holders -----------------------------------------------------------------------------

    @abstractmethod
    def hold(self, tail: Segment, count: int = 1) -> Reading:
        """Lets `count` more contexts hold a path; returns its sums."""

    @abstractmethod
    def let_go(self, tail: Segment) -> None:
        """Lets one context less hold a path."""

    @abstractmethod
    def begin(self, child: Segment) -> None:
        """Lets the context that holds the path above hold a new, empty segment below it too."""

    # -- shape -------------------------------------------------------------------------------

    @abstractmethod
    def split(self, upper: Segment, lower: Segment) -> None:
        """Takes in that a segment was cut: who holds the lower part holds the upper one too."""

    @abstractmethod
    def join(self, upper: Segment, child: Segment) -> None:
        """Takes in that a segment has become one with its single child, which remains."""

    @abstractmethod
    def rehang(self, segment: Segment, above: Segment) -> None:
        """Takes in that a segment is about to hang from an ancestor of its parent."""

    # -- audit -------------------------------------------------------------------------------

    @abstractmethod
    def check(self, segments: Iterable[Segment], num_held: int) -> None:
        """Asserts that meters and segments agree.

        Args:
            segments: All segments but the roots.
            num_held: Blocks that contexts hold, each counted once.
        """

    @abstractmethod
    def num_holders(self, segment: Segment) -> int | None:
        """Contexts that hold a segment; None where nothing has to be counted."""

    @property
    @abstractmethod
    def is_idle(self) -> bool:
        """Whether no meter runs, as it must be when no context is left."""

    # -- inside ------------------------------------------------------------------------------

    def _set_blocks(self, meter: Meter, num_blocks: int) -> None:
        change = num_blocks - meter.num_blocks
        if change:
            self._settle(meter.tenancy)
            meter.tenancy.num_blocks += change
            meter.num_blocks = num_blocks

    def _settle(self, tenancy: Tenancy) -> None:
        tenancy.block_seconds += tenancy.num_blocks * (self.now - tenancy.at)
        if tenancy.window is not None:
            tenancy.window.add(tenancy.at, self.now, tenancy.num_blocks)
        tenancy.at = self.now
