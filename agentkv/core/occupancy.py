"""Who pays for the blocks of one tier, and for how long: block-seconds, split among holders.

A context holds a block while its path runs through it and it is kept at the tier's level. A block
that n contexts hold costs each of them 1/n of a block-second per second; what no context holds is
charged to the pool. It knows segments and time as it is told, and neither contexts nor tenants.

    Each held segment has a meter of two integrals: `share`, of blocks / holders, and `alone`, of
    blocks. A context's bill is the sum along its path now, less that sum when it began to hold.
    A meter is brought up to date only when its segment's blocks or holders change, so time costs
    nothing by itself, and a fork costs one addition per segment of its path. Where a segment is
    cut, joined or hung elsewhere, its meters are rewritten such that no sum along a path changes.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple, TypeAlias

from agentkv.core.block_pool import BlockPool
from agentkv.core.segment import Hold, Segment
from agentkv.core.sliding_sum import SlidingSum


class Tier(IntEnum):
    """Where blocks are."""

    DEVICE = 0
    HOST = 1
    DISK = 2


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
class _Meter:
    """One held segment: rates since `at`, integrals up to it."""

    tenancy: Tenancy
    at: float
    num_holders: int = 0
    num_blocks: int = 0
    share: float = 0.0
    alone: float = 0.0

    def settle(self, now: float) -> None:
        used = self.num_blocks * (now - self.at)
        self.share += used / self.num_holders
        self.alone += used
        self.at = now


class Occupancy:
    """Block-seconds of one tier.

    Invariants (`check`): a segment has a meter exactly while a context holds it; the meters'
    blocks add up to what is held; what tenancies and pool are charged adds up to what is taken.
    """

    def __init__(
        self, tier: Tier, pool: BlockPool, level: Hold, num_owned: Callable[[Segment], int]
    ) -> None:
        self.tier = tier
        self.level = level
        """Contexts kept at this level or above hold what is on their path."""
        self.now = 0.0
        self.taken_block_seconds = 0.0
        """Integral of the blocks taken from the pool, held or not."""
        self._pool = pool
        self._num_owned = num_owned
        self._meters: dict[Segment, _Meter] = {}
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

    def read(self, tail: Segment) -> Reading:
        """Sums up a path."""
        share = alone = 0.0
        node, now, meters = tail, self.now, self._meters
        while node.parent is not None:
            meter = meters.get(node)
            if meter is not None:
                used = meter.num_blocks * (now - meter.at)
                share += meter.share + used / meter.num_holders
                alone += meter.alone + used
            node = node.parent
        return Reading(share, alone)

    # -- holders -----------------------------------------------------------------------------

    def hold(self, tail: Segment, count: int = 1) -> Reading:
        """Lets `count` more contexts hold a path; returns its sums."""
        share = alone = 0.0
        node, now, meters = tail, self.now, self._meters
        while node.parent is not None:
            meter = meters.get(node)
            if meter is None:
                meter = meters[node] = _Meter(self.tenancy(node.account), now)
                self._set_blocks(meter, self._num_owned(node))
            else:
                meter.settle(now)
            meter.num_holders += count
            share += meter.share
            alone += meter.alone
            node = node.parent
        return Reading(share, alone)

    def let_go(self, tail: Segment) -> None:
        """Lets one context less hold a path."""
        self._drop(tail, tail.root, 1)

    def begin(self, child: Segment) -> None:
        """Lets the context that holds the path above hold a new, empty segment below it too."""
        self._meters[child] = _Meter(self.tenancy(child.account), self.now, num_holders=1)

    # -- blocks and shape --------------------------------------------------------------------

    def resize(self, segment: Segment) -> None:
        """Takes in that the blocks of a segment have changed."""
        meter = self._meters.get(segment)
        if meter is not None:
            meter.settle(self.now)
            self._set_blocks(meter, self._num_owned(segment))

    def split(self, upper: Segment, lower: Segment) -> None:
        """Takes in that a segment was cut: who holds the lower part holds the upper one too."""
        meter = self._meters.get(lower)
        if meter is None:
            return
        meter.settle(self.now)
        self._meters[upper] = _Meter(
            meter.tenancy,
            meter.at,
            meter.num_holders,
            self._num_owned(upper),
            meter.share,
            meter.alone,
        )
        meter.share = meter.alone = 0.0
        meter.num_blocks = self._num_owned(lower)

    def join(self, upper: Segment, child: Segment) -> None:
        """Takes in that a segment has become one with its single child, which remains."""
        above = self._meters.pop(upper, None)
        if above is None:
            return
        meter = self._meters[child]
        assert above.num_holders == meter.num_holders, "a holder ends at a joined segment"
        above.settle(self.now)
        meter.settle(self.now)
        meter.share += above.share
        meter.alone += above.alone
        meter.num_blocks = self._num_owned(child)

    def rehang(self, segment: Segment, above: Segment) -> None:
        """Takes in that a segment is about to hang from an ancestor of its parent."""
        meter = self._meters.get(segment)
        if meter is None:
            return
        assert segment.parent is not None
        passed = self.read(segment.parent).since(self.read(above))
        meter.settle(self.now)
        meter.share += passed.share
        meter.alone += passed.alone
        self._drop(segment.parent, above, meter.num_holders)

    # -- audit -------------------------------------------------------------------------------

    def check(self, segments: Iterable[Segment], num_held: int) -> None:
        """Asserts that meters and segments agree.

        Args:
            segments: All segments but the roots.
            num_held: Blocks that contexts hold, each counted once.
        """
        held = {segment for segment in segments if segment.holds[self.level]}
        assert held == self._meters.keys(), "a meter runs for nobody, or none for a holder"
        for segment, meter in self._meters.items():
            assert meter.num_blocks == self._num_owned(segment), "a meter counts other blocks"
            assert meter.num_holders >= segment.holds[self.level]
        assert sum(meter.num_blocks for meter in self._meters.values()) == num_held
        assert sum(tenancy.num_blocks for tenancy in self._tenancies.values()) == num_held

    def num_holders(self, segment: Segment) -> int:
        """Contexts that hold a segment."""
        meter = self._meters.get(segment)
        return 0 if meter is None else meter.num_holders

    # -- inside ------------------------------------------------------------------------------

    def _drop(self, segment: Segment, above: Segment, count: int) -> None:
        """Takes holders from a segment and its ancestors below `above`."""
        node, now, meters = segment, self.now, self._meters
        while node is not above:
            meter = meters[node]
            meter.settle(now)
            meter.num_holders -= count
            if not meter.num_holders:
                self._set_blocks(meter, 0)
                del meters[node]
            assert node.parent is not None
            node = node.parent

    def _set_blocks(self, meter: _Meter, num_blocks: int) -> None:
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
