"""Block-seconds on the device: each held segment has a meter of the blocks that are its own.

A block cut by a fork belongs to its topmost lister, and whoever holds a lower part holds that one
too, so the blocks of a path are those of its segments. It owns these meters; the words, and who is
charged, are `occupancy`'s.
"""

from collections.abc import Callable, Iterable

from agentkv.core.block_move import Tier
from agentkv.core.block_pool import BlockPool
from agentkv.core.occupancy import Meter, Occupancy, Reading
from agentkv.core.segment import Hold, Segment


class DeviceOccupancy(Occupancy):
    """Block-seconds of the device.

    Invariants (`check`): a segment has a meter exactly while a context holds it; the meters'
    blocks add up to what is held.
    """

    def __init__(self, pool: BlockPool, num_owned: Callable[[Segment], int]) -> None:
        super().__init__(Tier.DEVICE, pool, Hold.KV)
        self._num_owned = num_owned
        self._meters: dict[Segment, Meter] = {}

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
                meter = meters[node] = Meter(self.tenancy(node.account), now)
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
        self._meters[child] = Meter(self.tenancy(child.account), self.now, num_holders=1)

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
        self._meters[upper] = Meter(
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

    @property
    def is_idle(self) -> bool:
        """Whether no meter runs."""
        return not self._meters

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
