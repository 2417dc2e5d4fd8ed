"""Blocks for tokens that are about to get KV: what a step needs, and copy-on-write.

Copy-on-write is decided here and done by the runner before the step writes anything. Planning
changes nothing that a caller could see; only `apply` takes blocks.
"""

from dataclasses import dataclass
from typing import NamedTuple

from agentkv.core import prefix_match
from agentkv.core.batch import BlockCopy
from agentkv.core.context_tree import ContextTree
from agentkv.core.segment import Hold, Segment


class SegmentWrite(NamedTuple):
    """KV to be written for the tokens [num_computed, upto) of one segment."""

    segment: Segment
    upto: int
    num_blocks: int
    """Blocks to take, the one for a copy included."""
    is_copy: bool
    """Whether the block that holds the first of these positions must be copied first."""


@dataclass(frozen=True, slots=True)
class BlockWrites:
    """What writing KV up to a position of a path takes."""

    writes: tuple[SegmentWrite, ...]

    @property
    def num_blocks(self) -> int:
        """Free blocks needed."""
        return sum(write.num_blocks for write in self.writes)


def plan_writes(tree: ContextTree, tail: Segment, upto: int) -> BlockWrites:
    """Plans KV for the tokens of a path that have none yet, up to a position."""
    _settle(tree, tail, upto)
    writes = []
    for segment in tree.path(tail):
        if segment.is_computed or segment.start >= upto:
            continue
        position, end = segment.num_computed, min(upto, segment.end)
        is_copy = not _is_writable(tree, segment)
        num_blocks = -(-end // tree.block_size) - (-(-position // tree.block_size)) + is_copy
        writes.append(SegmentWrite(segment, end, num_blocks, is_copy))
    return BlockWrites(tuple(writes))


def apply_writes(tree: ContextTree, planned: BlockWrites) -> list[BlockCopy]:
    """Takes the planned blocks; returns the copies to do before the step writes."""
    copies = []
    for write in planned.writes:
        block_ids = tree.pool.allocate(write.num_blocks)
        if write.is_copy:
            copies.append(_copy_block(tree, write.segment, block_ids))
        else:
            tree.residency.grow(write.segment, block_ids)
    return copies


def commit_writes(tree: ContextTree, planned: BlockWrites) -> None:
    """Records that the step wrote the planned KV: from now on it can be matched."""
    for write in planned.writes:
        tree.residency.set_computed(write.segment, write.upto)
        prefix_match.index(write.segment, tree.block_size)


def roll_back_writes(tree: ContextTree, planned: BlockWrites) -> None:
    """Gives back the blocks of a step that failed; copied KV may be torn and goes too."""
    for write in reversed(planned.writes):
        segment = write.segment
        tree.strip(segment, segment.start if write.is_copy else segment.num_computed)


def _is_writable(tree: ContextTree, segment: Segment) -> bool:
    """Whether the block that holds the next position is this segment's alone, or yet to come."""
    if segment.num_computed % tree.block_size == 0:
        return True
    return bool(segment.blocks) and tree.pool.count(segment.blocks[-1]) == 1


def _settle(tree: ContextTree, tail: Segment, upto: int) -> None:
    """Lets each segment that will be written stand on its own block where that takes no copy."""
    node = tail
    while node.parent is not None and not node.is_computed:
        if node.start < upto:
            _make_last_holder(tree, node)
            if node.start % tree.block_size and not node.parent.is_computed:
                # The block above has nothing to copy yet: compute those few tokens twice, each
                # branch in its own block, rather than wait a step for a copy.
                tree.rehang(node, node.start - node.start % tree.block_size)
        node = node.parent


def _make_last_holder(tree: ContextTree, segment: Segment) -> None:
    """Drops prefix cache that alone keeps a segment from writing in place.

    Joining makes the segment the owner of the block, one cut after the other.
    """
    while not _is_writable(tree, segment):
        parent = segment.parent
        assert parent is not None
        others = [child for child in parent.children if child is not segment]
        if parent.num_contexts or any(other.holds[Hold.TOKENS] for other in others):
            return
        assert others, "a context-free segment with one child was not joined"
        for other in others:
            tree.discard(other)


def _copy_block(tree: ContextTree, segment: Segment, block_ids: list[int]) -> BlockCopy:
    """Moves a segment from a shared, partly filled block to a copy of it."""
    parent, position = segment.parent, segment.num_computed
    assert parent is not None and parent.is_computed
    boundary = position - position % tree.block_size
    source = parent.blocks[-1]
    tree.strip(segment, segment.start)
    tree.rehang(segment, boundary)
    tree.residency.grow(segment, block_ids)
    tree.residency.set_computed(segment, position)
    return BlockCopy(source, block_ids[0], position - boundary)
