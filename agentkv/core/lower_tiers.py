"""The tiers below the device pool: which block is whose, which moves are due, what goes first.

KV that leaves the device is listed by its segment as `away`. This file owns the pools of the
lower tiers, counts, the order of eviction, and the list of moves that the next step starts with.
It does not decide when something moves, and does not change the shape of the tree.
"""

import heapq
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from agentkv.core.away_occupancy import AwayOccupancy
from agentkv.core.block_move import LOWER_TIERS, BlockMove, MoveCosts, Place, Tier
from agentkv.core.block_pool import BlockPool
from agentkv.core.segment import Hold, Segment
from agentkv.core.views import TierView


class Rank(NamedTuple):
    """Order of eviction: prefix cache before what contexts hold, then least recently used."""

    is_held: bool
    last_used: int
    segment_id: int

    @classmethod
    def of(cls, segment: Segment) -> "Rank":
        """Ranks a segment as it is now."""
        return cls(segment.holds[Hold.TOKENS] > 0, segment.last_used, segment.id)


class LowerTiers:
    """Host and disk blocks; a pool of no blocks is a tier that is not there.

    Invariants: a block's count is the number of segments that list it as away; `num_live` counts,
    per tier, the blocks that a segment with a context lists; `moves` is in the order of decision.
    """

    def __init__(self, block_size: int, *, host_blocks: int = 0, disk_blocks: int = 0) -> None:
        self.block_size = block_size
        self.pools = {Tier.HOST: BlockPool(host_blocks), Tier.DISK: BlockPool(disk_blocks)}
        self.occupancies = tuple(
            AwayOccupancy(tier, pool) for tier, pool in self.pools.items() if pool.num_blocks
        )
        """Who pays for what is held, by tier."""
        self.costs = MoveCosts()
        self.moves: list[BlockMove] = []
        """Decided, and not handed to a step yet."""
        self._fetches: dict[Place, None] = {}
        """Disk blocks to be read ahead, and not handed to a step yet."""
        self._fetching: set[Place] = set()
        self._fetched: set[Place] = set()
        self.num_live = dict.fromkeys(LOWER_TIERS, 0)
        self._holders: dict[Place, int] = {}
        """Segments with contexts that list a place."""
        self._leaves: dict[Tier, list[tuple[Rank, Segment]]] = {tier: [] for tier in LOWER_TIERS}

    def view(self, tier: Tier) -> TierView:
        """Counts the blocks of a tier."""
        pool, live = self.pools[tier], self.num_live[tier]
        num_cached = pool.num_blocks - pool.num_free - live
        return TierView(pool.num_blocks, pool.num_free, live, num_cached)

    @property
    def takes_blocks(self) -> bool:
        """Whether there is a host tier, and moving there is cheaper than computing again."""
        has_room = self.pools[Tier.HOST].num_blocks > 0
        return has_room and self.costs.moving_pays(self.block_size)

    # -- listings ----------------------------------------------------------------------------

    def set_away(self, segment: Segment, away: list[Place], kept_end: int) -> None:
        """Replaces what a segment lists as away; counts of the pools are the caller's affair."""
        held, parent = segment.holds[Hold.TOKENS] > 0, segment.parent
        last_before = segment.away[-1] if segment.away else None
        assert parent is not None
        for tier in LOWER_TIERS:
            had = any(place.tier is tier for place in segment.away)
            has = any(place.tier is tier for place in away)
            parent.num_away_children[tier] += has - had
        if held:
            self._let_go(segment.away)
        segment.away, segment.kept_end = away, kept_end
        if held:
            self._count(away)
        for occupancy in self.occupancies:
            occupancy.relist(segment, last_before)
        self.offer(segment)

    def take_off(self, segment: Segment) -> list[Place]:
        """Makes a segment list nothing as away; returns what it listed, which stays counted."""
        away = segment.away
        self.set_away(segment, [], segment.num_computed)
        return away

    def on_held(self, segment: Segment) -> None:
        """Counts the first context on a segment."""
        self._count(segment.away)

    def on_let_go(self, segment: Segment) -> None:
        """Counts the last context off a segment."""
        self._let_go(segment.away)

    def acquire(self, place: Place) -> None:
        """Counts one more listing of a place; who lists it already is to be told by `relist`."""
        self.pools[place.tier].acquire(place.block_id)

    def relist(self, segment: Segment) -> None:
        """Takes in that others list what a segment lists as well."""
        self.set_away(segment, segment.away, segment.kept_end)

    def release(self, places: Sequence[Place]) -> None:
        """Gives back one listing of each place."""
        for tier in LOWER_TIERS:
            listed = [place.block_id for place in places if place.tier is tier]
            if listed:
                self.pools[tier].release(listed)

    def move(self, src: Place, tier: Tier) -> Place:
        """Takes a free block of a lower tier and notes that a block moves there."""
        (block_id,) = self.pools[tier].allocate(1)
        dst = Place(tier, block_id)
        self._fetching.discard(dst)
        self._fetched.discard(dst)
        self.moves.append(BlockMove(src, dst))
        return dst

    def take_moves(self) -> tuple[BlockMove, ...]:
        """Hands over the moves decided since the last call."""
        moves = tuple(self.moves)
        self.moves.clear()
        return moves

    # -- reading ahead -----------------------------------------------------------------------

    def fetch(self, places: Iterable[Place]) -> bool:
        """Has what is on disk read ahead; returns whether all of it has been read by now.

        Reading a file may take long, so that no step waits for one.
        """
        awaited = [p for p in places if p.tier is Tier.DISK and p not in self._fetched]
        for place in awaited:
            if place not in self._fetching:
                self._fetching.add(place)
                self._fetches[place] = None
        return not awaited

    def on_fetched(self, places: Iterable[Place]) -> None:
        """Notes that reading some places has ended, well or not: moving them tells."""
        for place in places:
            if place in self._fetching:  # else the place was given to another block meanwhile
                self._fetching.remove(place)
                self._fetched.add(place)

    def take_fetches(self) -> tuple[Place, ...]:
        """Hands over the places to read ahead since the last call."""
        fetches = tuple(place for place in self._fetches if place in self._fetching)
        self._fetches.clear()
        return fetches

    # -- order of eviction -------------------------------------------------------------------

    def offer(self, segment: Segment) -> None:
        """Queues a segment for eviction in each tier in which it is a leaf that may go."""
        for tier in LOWER_TIERS if segment.away else ():
            if self._may_go(segment, tier):
                leaves = self._leaves[tier]
                if len(leaves) >= 2 * self.pools[tier].num_blocks + 16:
                    self._drop_stale(tier)
                heapq.heappush(leaves, (Rank.of(segment), segment))

    def pop_leaf(self, tier: Tier, bound: Rank) -> Segment | None:
        """Takes the leaf of a tier that goes first, unless what ranks like `bound` goes earlier."""
        leaves = self._leaves[tier]
        while leaves:
            rank, segment = leaves[0]
            if self._may_go(segment, tier) and rank == Rank.of(segment):
                if rank[:2] > bound[:2]:
                    return None
                heapq.heappop(leaves)
                return segment
            heapq.heappop(leaves)
            self.offer(segment)  # used, held or let go meanwhile
        return None

    def _may_go(self, segment: Segment, tier: Tier) -> bool:
        return (
            any(place.tier is tier for place in segment.away)
            and not segment.num_away_children[tier]
            and not segment.holds[Hold.FIRM]
        )

    def _drop_stale(self, tier: Tier) -> None:
        segments = {s for _, s in self._leaves[tier] if self._may_go(s, tier)}
        self._leaves[tier] = [(Rank.of(segment), segment) for segment in segments]
        heapq.heapify(self._leaves[tier])

    def _count(self, places: Sequence[Place]) -> None:
        for place in places:
            before = self._holders.get(place, 0)
            self._holders[place] = before + 1
            self.num_live[place.tier] += not before

    def _let_go(self, places: Sequence[Place]) -> None:
        for place in places:
            self._holders[place] -= 1
            if not self._holders[place]:
                del self._holders[place]
                self.num_live[place.tier] -= 1
