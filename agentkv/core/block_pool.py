"""Which blocks are free, and how many segments list each of the others.

The pool hands out ids. It never touches a tensor and does not know what a block holds, who lists
it, or why.
"""

import heapq
from collections import Counter
from collections.abc import Sequence


class BlockPool:
    """The block ids of one tier.

    Invariants: a block's count is the number of segments that list it; a free block is counted
    zero times; the free list has no duplicates; `release` is the only way back, and takes effect
    for a guarded block at `unguard`.
    """

    def __init__(self, num_blocks: int) -> None:
        assert num_blocks >= 0
        self.num_blocks = num_blocks
        self._counts = [0] * num_blocks
        # A heap: the lowest ids go first, so a long allocation gets consecutive ones, which a
        # kernel can read as one extent without gathering.
        self._free = list(range(num_blocks))
        self._guarded: set[int] = set()

    @property
    def num_free(self) -> int:
        """Blocks nobody lists."""
        return len(self._free)

    def count(self, block_id: int) -> int:
        """Segments that list this block."""
        return self._counts[block_id]

    def allocate(self, num_blocks: int) -> list[int]:
        """Takes free blocks, each counted once. The caller has made sure that they are there."""
        assert 0 <= num_blocks <= self.num_free
        block_ids = [heapq.heappop(self._free) for _ in range(num_blocks)]
        for block_id in block_ids:
            self._counts[block_id] = 1
        return block_ids

    def acquire(self, block_id: int) -> None:
        """Counts one more listing of a block in use."""
        assert self._counts[block_id] > 0
        self._counts[block_id] += 1

    def release(self, block_ids: Sequence[int]) -> int:
        """Gives back one count per listing and returns how many blocks became free.

        Giving back more than is counted is refused before any change.
        """
        given_back = Counter(block_ids)
        assert all(self._counts[block_id] >= n for block_id, n in given_back.items())
        num_freed = 0
        for block_id, n in given_back.items():
            self._counts[block_id] -= n
            if self._counts[block_id] == 0 and block_id not in self._guarded:
                heapq.heappush(self._free, block_id)
                num_freed += 1
        return num_freed

    def guard(self, block_id: int) -> None:
        """Keeps a block off the free list until `unguard`, even if its last count is given back."""
        self._guarded.add(block_id)

    def unguard(self) -> None:
        """Frees what was given back while it was guarded."""
        for block_id in self._guarded:
            if self._counts[block_id] == 0:
                heapq.heappush(self._free, block_id)
        self._guarded.clear()

    def check(self) -> None:
        """Asserts the invariants that need no knowledge of segments."""
        free = set(self._free)
        assert len(free) == len(self._free), "a block is twice on the free list"
        assert not self._guarded, "a step has not ended"
        assert all(
            (count == 0) == (block_id in free) for block_id, count in enumerate(self._counts)
        ), "a free block is counted, or a counted one is free"
