"""Block-seconds of a tier below the device: of what segments list as away.

Every context holds what is away on its path, however loosely it is kept. A block that one segment
lists is metered with that segment. A block that several list, because a fork cut it, has a meter
of its own: the parent's part may have come back to the device while its children's have not, and
then the block is held through siblings of which none is on another's path. On each path the
topmost segment that lists such a block is linked to its meter; who holds any linked segment holds
the block, once. When a segment is linked, what the block's meter shows is taken from the
segment's own, and given back when the link ends, so that no sum along a path jumps.

Most segments never list anything away, so a segment has a meter only from the first time it does,
while it is held; it keeps it, since the sums of those who hold it contain what it shows.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from agentkv.core.block_move import Place, Tier
from agentkv.core.block_pool import BlockPool
from agentkv.core.occupancy import Meter, Occupancy, Reading
from agentkv.core.segment import Hold, Segment

NOTHING = Reading(0.0, 0.0)


@dataclass(slots=True)
class _SegmentMeter(Meter):
    """What a segment alone lists in the tier, and which blocks it is the topmost to share."""

    links: tuple[Place, ...] = ()


class AwayOccupancy(Occupancy):
    """Block-seconds of one lower tier.

    Invariants (`check`): a segment that a context holds and that lists a block of the tier has a
    meter; one that no context holds has none; each held block is metered once.
    """

    def __init__(self, tier: Tier, pool: BlockPool) -> None:
        super().__init__(tier, pool, Hold.TOKENS)
        self._meters: dict[Segment, _SegmentMeter] = {}
        self._shared: dict[Place, Meter] = {}
        """Of blocks that several segments list, or did."""

    def read(self, tail: Segment) -> Reading:
        """Sums up a path."""
        if not self._meters:
            return NOTHING
        return self._read(tail, tail.root)

    # -- holders -----------------------------------------------------------------------------

    def hold(self, tail: Segment, count: int = 1) -> Reading:
        """Lets `count` more contexts hold a path; returns its sums."""
        if not self._meters and tail.is_computed:  # then all above is on the device too
            return NOTHING
        share = alone = 0.0
        node = tail
        while node.parent is not None:
            meter = self._meters.get(node)
            if meter is not None:
                for part in self._parts(meter):
                    part.settle(self.now)
                    part.num_holders += count
                    share += part.share
                    alone += part.alone
            elif node.away:
                self._update(node, count)
            node = node.parent
        return Reading(share, alone)

    def let_go(self, tail: Segment) -> None:
        """Lets one context less hold a path."""
        if self._meters:
            self._drop(tail, tail.root, 1)

    def begin(self, child: Segment) -> None:
        """Counts nothing: a new segment has no KV yet."""

    # -- blocks ------------------------------------------------------------------------------

    def relist(self, segment: Segment, last_before: Place | None) -> None:
        """Takes in what a segment lists as away now, or that others list it too from now on.

        Args:
            segment: Any segment; its blocks are counted in the pool, the new ones already.
            last_before: The last block it listed until now, which may be the first one of some of
                its children.
        """
        self._update(segment, 0)
        last = segment.away[-1] if segment.away else None
        turned = [
            place
            for place in {last_before, last}
            if last_before != last and place is not None and place.tier is self.tier
        ]
        if any(self._pool.count(place.block_id) > 1 for place in turned):
            for child in segment.children:
                if child.away and child.away[0] in turned:
                    self._update(child, 0)

    # -- shape: what is away is taken off the segments concerned before, and listed again after --

    def split(self, upper: Segment, lower: Segment) -> None:
        """Takes in that a segment was cut: who holds the lower part holds the upper one too."""
        meter = self._meters.get(lower)
        if meter is not None:
            assert not meter.num_blocks and not meter.links
            self._meters[upper] = meter
            self._meters[lower] = _SegmentMeter(meter.tenancy, self.now, meter.num_holders)

    def join(self, upper: Segment, child: Segment) -> None:
        """Takes in that a segment has become one with its single child, which remains."""
        above = self._meters.pop(upper, None)
        if above is None:
            return
        assert not above.num_blocks and not above.links
        meter = self._meters.setdefault(child, above)
        assert above.num_holders == meter.num_holders, "a holder ends at a joined segment"
        if meter is not above:
            meter.share += above.share
            meter.alone += above.alone

    def rehang(self, segment: Segment, above: Segment) -> None:
        """Takes in that a segment is about to hang from an ancestor of its parent."""
        assert segment.parent is not None
        node, is_metered = segment.parent, False
        while node is not above:
            is_metered |= node in self._meters
            assert node.parent is not None
            node = node.parent
        if not is_metered or not segment.holds[Hold.TOKENS]:
            return
        passed = self._read(segment.parent, above)
        meter = self._meters.get(segment) or self._begin(segment, self._count_holders(segment))
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
        holders: Counter[Place] = Counter()
        once: Counter[Place] = Counter()
        metered = set(self._meters)
        for segment in segments:
            meter = self._meters.get(segment)
            if not segment.holds[Hold.TOKENS]:
                assert meter is None, "a meter runs for nobody"
                continue
            listed = self._topmost(segment)
            if meter is None:
                assert not any(place.tier is self.tier for place in segment.away), "no meter"
                continue
            metered.remove(segment)
            assert meter.num_blocks + len(meter.links) == len(listed), "a meter counts other blocks"
            assert set(meter.links) <= set(listed), "a link to what is not listed"
            once.update(place for place in listed if place not in meter.links)
            for place in meter.links:
                holders[place] += meter.num_holders
        assert not metered, "a meter of a segment that is not there"
        assert all(count == 1 for count in once.values()), "a shared block is metered as one's own"
        assert not once.keys() & self._shared.keys(), "a block is metered twice"
        assert holders == {place: m.num_holders for place, m in self._shared.items()}
        assert len(once) + len(self._shared) == num_held
        assert sum(tenancy.num_blocks for tenancy in self._tenancies.values()) == num_held

    def num_holders(self, segment: Segment) -> int | None:
        """Contexts that hold a segment; None while it has listed nothing away."""
        meter = self._meters.get(segment)
        return None if meter is None else meter.num_holders

    @property
    def is_idle(self) -> bool:
        """Whether no meter runs."""
        return not self._meters and not self._shared

    # -- inside ------------------------------------------------------------------------------

    def _read(self, segment: Segment, above: Segment) -> Reading:
        """Sums up a segment and its ancestors below `above`."""
        share = alone = 0.0
        node = segment
        while node is not above:
            meter = self._meters.get(node)
            if meter is not None:
                for part in self._parts(meter):
                    used = part.num_blocks * (self.now - part.at)
                    share += part.share + used / part.num_holders
                    alone += part.alone + used
            assert node.parent is not None
            node = node.parent
        return Reading(share, alone)

    def _parts(self, meter: _SegmentMeter) -> Iterable[Meter]:
        """Lists the meters that a segment adds to a sum: its own, and those it is linked to."""
        if not meter.links:
            return (meter,)
        return (meter, *[self._shared[place] for place in meter.links])

    def _topmost(self, segment: Segment) -> list[Place]:
        """Lists the blocks of the tier that a segment lists and its parent does not."""
        assert segment.parent is not None
        above = segment.parent.away[-1:]
        return [p for p in segment.away if p.tier is self.tier and p not in above]

    def _count_holders(self, segment: Segment) -> int:
        """Counts the contexts on a segment and below; walks what has no meter yet."""
        count, nodes = 0, [segment]
        while nodes:
            node = nodes.pop()
            meter = self._meters.get(node)
            if meter is not None:
                count += meter.num_holders
            else:
                count += node.num_contexts
                nodes.extend(node.children)
        return count

    def _begin(self, segment: Segment, num_holders: int) -> _SegmentMeter:
        tenancy = self.tenancy(segment.account)
        meter = self._meters[segment] = _SegmentMeter(tenancy, self.now, num_holders)
        return meter

    def _update(self, segment: Segment, num_holders: int) -> None:
        """Meters what a held segment lists now; `num_holders` is 0 if they have to be counted."""
        meter = self._meters.get(segment)
        if meter is None:
            is_listing = any(place.tier is self.tier for place in segment.away)
            if not is_listing or not (num_holders or segment.holds[Hold.TOKENS]):
                return
            meter = self._begin(segment, num_holders or self._count_holders(segment))
        meter.settle(self.now)
        listed = self._topmost(segment)
        links = [place for place in listed if self._pool.count(place.block_id) > 1]
        for place in set(meter.links).difference(links):
            self._unlink(meter, place)
        for place in set(links).difference(meter.links):
            self._link(meter, place)
        meter.links = tuple(links)
        self._set_blocks(meter, len(listed) - len(links))

    def _drop(self, segment: Segment, above: Segment, count: int) -> None:
        """Takes holders from a segment and its ancestors below `above`."""
        node = segment
        while node is not above:
            meter = self._meters.get(node)
            if meter is not None:
                if meter.num_holders == count:
                    for place in meter.links:
                        self._unlink(meter, place)
                    meter.settle(self.now)
                    self._set_blocks(meter, 0)
                    del self._meters[node]
                else:
                    for part in self._parts(meter):
                        part.settle(self.now)
                        part.num_holders -= count
            assert node.parent is not None
            node = node.parent

    def _link(self, meter: _SegmentMeter, place: Place) -> None:
        shared = self._shared.get(place)
        if shared is None:
            shared = self._shared[place] = Meter(meter.tenancy, self.now, meter.num_holders)
            self._set_blocks(shared, 1)
            return
        shared.settle(self.now)
        shared.num_holders += meter.num_holders
        meter.share -= shared.share
        meter.alone -= shared.alone

    def _unlink(self, meter: _SegmentMeter, place: Place) -> None:
        shared = self._shared[place]
        shared.settle(self.now)
        meter.share += shared.share
        meter.alone += shared.alone
        shared.num_holders -= meter.num_holders
        if not shared.num_holders:
            self._set_blocks(shared, 0)
            del self._shared[place]
