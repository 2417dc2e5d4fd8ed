"""How firmly each segment is kept, what that adds up to in blocks, and which KV goes first.

It counts holds along paths and orders what may be evicted. It does not decide when something is
evicted, and does not change the shape of the tree.
"""

import heapq

from agentkv.core.block_pool import BlockPool
from agentkv.core.device_occupancy import DeviceOccupancy
from agentkv.core.lower_tiers import LowerTiers
from agentkv.core.occupancy import Occupancy
from agentkv.core.segment import Hold, Segment


class Residency:
    """Holds, block counts per level, and the evictable leaves of one pool.

    Invariants: `held[level]` is the number of blocks whose topmost lister is held at that level;
    a segment's `held_below` is the same of its root alone; whatever is not held at `Hold.KV` can
    be reached by evicting leaf after leaf.
    """

    def __init__(self, pool: BlockPool, lower: LowerTiers, block_size: int) -> None:
        self.pool = pool
        self.lower = lower
        self.block_size = block_size
        self.held = [0] * len(Hold)
        self.used_slots = 0
        """Slots of allocated blocks that hold a token's KV, copies counted each."""
        self.device = DeviceOccupancy(pool, lambda segment: segment.num_owned(block_size))
        """Who pays for what is held on the device."""
        self.occupancies: tuple[Occupancy, ...] = (self.device, *lower.occupancies)
        """The same of each tier there is."""
        self._leaves: list[tuple[int, int, Segment]] = []

    @property
    def num_reclaimable(self) -> int:
        """Allocated blocks that no context holds: prefix cache, and KV that gave way."""
        return self.pool.num_blocks - self.pool.num_free - self.held[Hold.KV]

    def hold(self, segment: Segment, low: Hold, high: Hold, count: int = 1) -> None:
        """Adds `count` holds at every level of [low, high] to a segment and so to its path."""
        for level in range(low, high + 1):
            node: Segment | None = segment
            added = count
            while node is not None:
                before = node.holds[level]
                node.holds[level] = before + added
                if before:
                    break
                if level == Hold.TOKENS:
                    self.lower.on_held(node)
                self._count(node, level, node.num_owned(self.block_size))
                node, added = node.parent, 1

    def unhold(self, segment: Segment, low: Hold, high: Hold) -> None:
        """Takes one hold of every level of [low, high] from a segment and so from its path."""
        for level in range(low, high + 1):
            node: Segment | None = segment
            while node is not None:
                assert node.holds[level] > 0
                node.holds[level] -= 1
                if node.holds[level]:
                    break
                self._count(node, level, -node.num_owned(self.block_size))
                if level == Hold.TOKENS:
                    self.lower.on_let_go(node)
                if level == Hold.KV:
                    self.offer(node)
                if level in (Hold.TOKENS, Hold.FIRM):
                    self.lower.offer(node)
                node = node.parent

    def grow(self, segment: Segment, block_ids: list[int]) -> None:
        """Lists more blocks at the end of a segment."""
        self._resize(segment, segment.blocks + block_ids)

    def shrink(self, segment: Segment, num_blocks: int) -> None:
        """Gives back all blocks of a segment but the first `num_blocks`."""
        self.pool.release(segment.blocks[num_blocks:])
        self._resize(segment, segment.blocks[:num_blocks])

    def set_computed(self, segment: Segment, num_computed: int) -> None:
        """Moves the position up to which a segment's tokens have KV."""
        self.used_slots += num_computed - segment.num_computed
        segment.num_computed = num_computed

    def offer(self, segment: Segment) -> None:
        """Queues a segment for eviction if it is a leaf, as far as KV goes, that may go."""
        if self._may_go(segment):
            if len(self._leaves) >= 2 * self.pool.num_blocks:
                self._drop_stale()
            heapq.heappush(self._leaves, (segment.last_used, segment.id, segment))

    def pop_leaf(self) -> Segment | None:
        """Takes the least recently used leaf that may be evicted; None when there is none."""
        while self._leaves:
            last_used, _, segment = heapq.heappop(self._leaves)
            # Entries go stale when a segment is used again, held again or gone: sort that out
            # here instead of searching the heap at every change.
            if last_used != segment.last_used:
                self.offer(segment)
            elif self._may_go(segment):
                return segment
        return None

    def _drop_stale(self) -> None:
        """Keeps one entry per leaf: without pressure nothing else would take stale ones out."""
        leaves = {segment for _, _, segment in self._leaves if self._may_go(segment)}
        self._leaves = [(segment.last_used, segment.id, segment) for segment in leaves]
        heapq.heapify(self._leaves)

    def _may_go(self, segment: Segment) -> bool:
        return bool(segment.blocks) and not segment.holds[Hold.KV] and not segment.num_kv_children

    def _count(self, segment: Segment, level: int, change: int) -> None:
        self.held[level] += change
        segment.held_below[level] += change

    def _resize(self, segment: Segment, blocks: list[int]) -> None:
        before, had_kv = segment.num_owned(self.block_size), bool(segment.blocks)
        segment.set_blocks(blocks)
        self.device.resize(segment)
        change = segment.num_owned(self.block_size) - before
        for level in Hold:
            if segment.holds[level]:
                self._count(segment, level, change)
        if segment.parent is not None:
            segment.parent.num_kv_children += bool(blocks) - had_kv
