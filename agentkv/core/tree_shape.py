"""How segments are cut in two, joined with an only child, and hung elsewhere on the same path.

Each leaves every path its tokens, and every block its count of segments. When to cut, join or
rehang is `context_tree`'s and `block_writes`' affair.
"""

from array import array
from typing import TYPE_CHECKING

from agentkv.core import prefix_match
from agentkv.core.block_move import Place
from agentkv.core.segment import Hold, Segment

if TYPE_CHECKING:
    from agentkv.core.context_tree import ContextTree


def split(tree: "ContextTree", segment: Segment, position: int) -> Segment:
    """Cuts a segment in two; returns the upper part. Contexts and children stay below.

    The cut costs a copy of the tokens behind it, so a cut near the end is cheap however long
    the segment is.
    """
    assert segment.start < position < segment.end
    size = tree.block_size
    parent = segment.parent
    assert parent is not None
    prefix_match.unindex(segment)
    first_away, kept_end = segment.num_computed // size, segment.num_kept
    away = tree.lower.take_off(segment)
    upper = tree.make_segment(segment.start, segment.tokens, parent)
    segment.tokens = upper.tokens[position - segment.start :]
    del upper.tokens[position - segment.start :]
    first = segment.start // size
    num_above = -(-position // size) - first
    above, below = segment.blocks[:num_above], segment.blocks[num_above:]
    if position % size and segment.num_computed > position:
        tree.pool.acquire(above[-1])  # both parts list the block that is cut
        below.insert(0, above[-1])
    upper.set_blocks(above)
    segment.set_blocks(below)
    upper.num_computed = min(segment.num_computed, position)
    segment.num_computed = max(segment.num_computed, position)
    segment.start = position
    upper.holds = [int(held > 0) for held in segment.holds]
    upper.last_used = segment.last_used
    upper.num_kv_children = int(bool(segment.blocks))
    upper.children[segment] = None
    segment.parent = upper
    del parent.children[segment]
    parent.children[upper] = None
    for occupancy in tree.residency.occupancies:
        occupancy.split(upper, segment)
    if away:
        num_above = max(0, -(-min(position, kept_end) // size) - first_away)
        _split_away(tree, upper, segment, away, num_above, kept_end)
    for part in (upper, segment):
        prefix_match.index(part, size)
    tree.residency.offer(upper)
    return upper


def _split_away(
    tree: "ContextTree",
    upper: Segment,
    lower: Segment,
    away: list[Place],
    num_above: int,
    kept_end: int,
) -> None:
    """Gives the first away blocks to the upper part, the rest to the lower, a cut one to both."""
    above, below = away[:num_above], away[num_above:]
    if lower.start % tree.block_size and kept_end > lower.start and above:
        tree.lower.acquire(above[-1])
        below.insert(0, above[-1])
    tree.lower.set_away(upper, above, min(kept_end, lower.start))
    tree.lower.set_away(lower, below, kept_end)


def join(tree: "ContextTree", segment: Segment) -> None:
    """Joins a segment with its single child if no context ends at it; the child remains."""
    if segment.is_root or segment.num_contexts or len(segment.children) != 1:
        return
    (child,) = segment.children
    parent = segment.parent
    assert parent is not None
    for part in (child, segment):
        prefix_match.unindex(part)
    away, kept_end = _join_away(tree, segment, child)
    blocks = segment.blocks
    if child.blocks:
        is_cut = child.start % tree.block_size != 0
        if is_cut:  # both list the block that a fork cut
            tree.pool.release([child.blocks[0]])
        blocks = blocks + child.blocks[is_cut:]
    if not segment.is_computed:
        child.num_computed = segment.num_computed
    child.set_blocks(blocks)
    segment.set_blocks([])  # or a stale entry among the evictable leaves would free them
    segment.tokens.extend(child.tokens)
    child.tokens, child.start = segment.tokens, segment.start
    child.last_used = max(child.last_used, segment.last_used)
    del parent.children[segment]
    parent.children[child] = None
    child.parent = parent
    for occupancy in tree.residency.occupancies:
        occupancy.join(segment, child)
    tree.heads.drop(segment)
    if away:
        tree.lower.set_away(child, away, kept_end)
    prefix_match.index(child, tree.block_size)
    tree.residency.offer(child)


def _join_away(tree: "ContextTree", segment: Segment, child: Segment) -> tuple[list[Place], int]:
    """Takes both parts' away blocks off, for the one segment that they become."""
    is_cut = child.start % tree.block_size != 0
    kept_end = child.num_kept if child.away else segment.num_kept
    below = tree.lower.take_off(child)
    if below and is_cut and segment.is_computed and not child.blocks:
        # The child's first block away holds these few tokens too, and a block is in one tier.
        boundary = segment.end - segment.end % tree.block_size
        tree.strip(segment, max(segment.start, boundary))
    above = tree.lower.take_off(segment)
    if above and below and is_cut:
        tree.lower.release(above[-1:])
        del above[-1]
    return above + below, kept_end


def rehang(tree: "ContextTree", segment: Segment, position: int) -> None:
    """Hangs a segment at a block boundary above its start; its tokens then begin there.

    Its path stays the same tokens, but it no longer counts on the KV between the boundary and
    its old start, which its siblings keep.
    """
    assert position % tree.block_size == 0 and position < segment.start
    assert not segment.blocks
    assert not segment.away or segment.start - position < tree.block_size
    prefix_match.unindex(segment)
    kept_end, away = segment.num_kept, tree.lower.take_off(segment)
    old = segment.parent
    assert old is not None
    above, between = old, array("I")
    while above.start > position:
        assert above.parent is not None
        between, above = above.tokens + between, above.parent
    between = above.tokens[position - above.start :] + between
    if above.start < position:
        above = split(tree, above, position)
    else:
        assert above.parent is not None
        above = above.parent
    for level in Hold:
        if segment.holds[level]:
            tree.residency.hold(above, level, level)
    for occupancy in tree.residency.occupancies:
        occupancy.rehang(segment, above)
    del old.children[segment]
    above.children[segment] = None
    segment.parent = above
    segment.tokens = between + segment.tokens
    segment.start = segment.num_computed = position
    if away:
        tree.lower.set_away(segment, away, kept_end)
        prefix_match.index(segment, tree.block_size)
    for level in Hold:
        if segment.holds[level]:
            tree.residency.unhold(old, level, level)
    join(tree, old)
