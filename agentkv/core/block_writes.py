"""Blocks for tokens that are about to get KV: what a step needs, and copy-on-write.

Copy-on-write is decided here and done by the runner before the step writes anything. Planning
changes nothing that a caller could see; only `apply` takes blocks.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from agentkv.core import prefix_match
from agentkv.core.batch import BlockCopy
from agentkv.core.context_tree import ContextTree
from agentkv.core.segment import Hold, Segment
from agentkv.core.tree_shape import rehang


class SegmentWrite(NamedTuple):
    """What writing KV for the next tokens of one segment takes."""

    segment: Segment
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


def settle(tree: ContextTree, tail: Segment) -> None:
    """Lets each segment of a path that lacks KV stand on blocks of its own where that is free.

    Tokens and sharing stay the same. To be called before `plan_writes`, and before asking what
    the path lacks.
    """
    computed = tree.num_computed(tail)
    node = tail
    while node.parent is not None and not node.is_computed:
        if not node.away:
            _make_last_holder(tree, node)
        boundary = node.start - node.start % tree.block_size
        if boundary < node.start and not node.blocks:
            if node.away:  # its first block away holds the few tokens above as well
                rehang(tree, node, boundary)
            elif not _share_away(tree, node, boundary) and computed <= boundary:
                # The block above has nothing to copy yet: this branch computes those few tokens in
                # a block of its own rather than wait until another one can be copied.
                rehang(tree, node, boundary)
        node = node.parent


def plan_writes(tree: ContextTree, tail: Segment, upto: int) -> BlockWrites:
    """Plans KV for the tokens of a settled path that have none yet, up to a position."""
    computed, size = tree.num_computed(tail), tree.block_size
    writes: list[SegmentWrite] = []
    node = tail
    while node.parent is not None and not node.is_computed:
        if node.start < upto:
            end, is_copy = min(upto, node.end), not _is_writable(tree, node)
            # A copy takes over all that is computed in the block, so what else its old parent
            # lacks is not needed any more.
            num_listed = computed // size if is_copy else _num_listed(node, size)
            writes.append(SegmentWrite(node, max(0, -(-end // size) - num_listed), is_copy))
            if is_copy:
                break
        node = node.parent
    return BlockWrites(tuple(reversed(writes)))


def forgo_copy(tree: ContextTree, tail: Segment) -> bool:
    """Lets a path compute again what it would copy, if nothing pinned keeps the block.

    A copy needs its source beside it: one block more than the path itself. Where that block is
    not to be had, the tokens in it are computed a second time instead.

    Returns:
        Whether the path had a copy to do without, and now lacks a few more tokens.
    """
    node = tail
    while node.parent is not None and not node.is_computed:
        if not _is_writable(tree, node):
            lister = _source(node)
            while lister.start % tree.block_size and lister.parent is not None:
                lister = lister.parent
            if lister.holds[Hold.PINNED]:
                return False
            computed = tree.num_computed(node)
            tree.strip(node, node.start)
            rehang(tree, node, computed - computed % tree.block_size)
            return True
        node = node.parent
    return False


def apply_writes(tree: ContextTree, planned: BlockWrites) -> list[BlockCopy]:
    """Takes the planned blocks; returns the copies to do before the step writes.

    A source is guarded until the step has ended, so that no other copy of the step can have it as
    its destination: the copies may be done in any order.
    """
    copies = []
    for write in planned.writes:
        block_ids = tree.pool.allocate(write.num_blocks)
        if write.is_copy:
            copies.append(_copy_block(tree, write.segment, block_ids))
        else:
            tree.residency.grow(write.segment, block_ids)
    return copies


def commit_writes(tree: ContextTree, tail: Segment, upto: int) -> None:
    """Records that a step wrote KV up to a position of a path: from now on it can be matched.

    Rows that ran again for their log-probabilities may end below what has KV already.
    """
    for segment in tree.path(tail):
        if segment.num_computed < min(segment.end, upto):
            tree.residency.set_computed(segment, min(segment.end, upto))
            prefix_match.index(segment, tree.block_size)


def roll_back_writes(tree: ContextTree, tail: Segment, copies: Iterable[BlockCopy]) -> None:
    """Gives back the blocks a failed step took for a path; copied KV may be torn and goes too."""
    torn = {copy.dst_block_id for copy in copies}
    for segment in reversed(tree.path(tail)):
        kept = segment.num_computed
        for number, block_id in enumerate(segment.blocks):
            if block_id in torn:
                boundary = (segment.start // tree.block_size + number) * tree.block_size
                kept = max(segment.start, min(kept, boundary))
        if not segment.num_kv_children:
            tree.strip(segment, kept)


def _is_writable(tree: ContextTree, segment: Segment) -> bool:
    """Whether the block that holds the next position is this segment's alone, or yet to come."""
    if segment.num_computed % tree.block_size == 0:
        return True
    return bool(segment.blocks) and tree.pool.count(segment.blocks[-1]) == 1


def _num_listed(segment: Segment, block_size: int) -> int:
    """Counts the blocks of a path up to the last one that a segment lists or stands on.

    While a step is planned, a segment may list blocks already that the step is yet to fill.
    """
    listed = segment.start // block_size + len(segment.blocks)
    return max(-(-segment.num_computed // block_size), listed)


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


def _share_away(tree: ContextTree, segment: Segment, boundary: int) -> bool:
    """Lets a segment count on the block away that holds the tokens just above it, if one does.

    Brought back for this segment alone, the block is its copy.
    """
    lister = segment.parent
    while lister is not None and lister.num_kept == lister.start and not lister.is_root:
        lister = lister.parent
    if lister is None or not lister.away or lister.kept_end <= boundary:
        return False
    place, kept_end = lister.away[-1], lister.kept_end
    tree.lower.acquire(place)
    tree.lower.relist(lister)
    rehang(tree, segment, boundary)
    tree.lower.set_away(segment, [place], kept_end)
    prefix_match.index(segment, tree.block_size)
    return True


def _copy_block(tree: ContextTree, segment: Segment, block_ids: list[int]) -> BlockCopy:
    """Moves a segment from a shared, partly filled block to a copy of it."""
    computed = tree.num_computed(segment)
    boundary = computed - computed % tree.block_size
    source = _source(segment).blocks[-1]
    tree.pool.guard(source)  # before anything below can give it back
    tree.strip(segment, segment.start)
    rehang(tree, segment, boundary)
    tree.residency.grow(segment, block_ids)
    tree.residency.set_computed(segment, computed)
    return BlockCopy(source, block_ids[0], computed - boundary)


def _source(segment: Segment) -> Segment:
    """Finds who lists the block that holds the last computed token of a path."""
    while not segment.blocks:
        assert segment.parent is not None
        segment = segment.parent
    return segment
