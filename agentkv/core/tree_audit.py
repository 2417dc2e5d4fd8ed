"""Asserts every invariant of a context tree; costs a walk over all segments.

For tests, and for an engine that is idle. It changes nothing.
"""

from collections import Counter
from itertools import pairwise
from typing import TYPE_CHECKING

from agentkv.core.block_move import LOWER_TIERS, Place
from agentkv.core.segment import Hold, Segment

if TYPE_CHECKING:
    from agentkv.core.context_tree import ContextTree


def check_tree(tree: "ContextTree") -> None:
    """Asserts what the docstrings of tree, segments, pools and residency promise."""
    tree.pool.check()
    counts = [0] * tree.pool.num_blocks
    held = [0] * len(Hold)
    used_slots = 0
    for segment in tree:
        _check_segment(segment, tree.block_size)
        _check_away(segment, tree.block_size)
        used_slots += segment.num_computed - segment.start
        for block_id in segment.blocks:
            counts[block_id] += 1
        for level in Hold:
            if segment.holds[level]:
                held[level] += segment.num_owned(tree.block_size)
    assert counts == [tree.pool.count(block_id) for block_id in range(len(counts))]
    assert held == tree.residency.held, "blocks held per level drifted"
    for level in Hold:
        below = sum(root.held_below[level] for root in tree.roots if root.account is root)
        assert held[level] == below, "blocks held per root drifted"
    assert used_slots == tree.residency.used_slots, "used slots drifted"
    tree.residency.device.check(tree, tree.residency.held[Hold.KV])
    for root in tree.roots:
        assert len(root.tokens) == 0 and not root.blocks and root.start == 0
    _check_lower(tree)


def _check_lower(tree: "ContextTree") -> None:
    """Checks the pools of the lower tiers as the device's: counts, and free + live + cached."""
    counts: Counter[Place] = Counter()
    live: set[Place] = set()
    for segment in tree:
        counts.update(segment.away)
        if segment.holds[Hold.TOKENS]:
            live.update(segment.away)
    for tier in LOWER_TIERS:
        pool = tree.lower.pools[tier]
        pool.check()
        for block_id in range(pool.num_blocks):
            assert pool.count(block_id) == counts[Place(tier, block_id)], "a place is miscounted"
        assert tree.lower.num_live[tier] == sum(place.tier is tier for place in live)
        view = tree.lower.view(tier)
        for occupancy in tree.lower.occupancies:
            if occupancy.tier is tier:
                occupancy.check(tree, view.live)
        assert min(view) >= 0 and view.free + view.live + view.cached == view.total


def _check_segment(segment: Segment, size: int) -> None:
    parent = segment.parent
    assert parent is not None
    assert segment in parent.children and segment.start == parent.end and segment.tokens
    assert segment.start <= segment.num_computed <= segment.end
    assert segment.num_computed == segment.start or parent.is_computed, "KV above is missing"
    covered = -(-segment.num_computed // size) - segment.start // size
    has_kv = segment.num_computed > segment.start
    assert len(segment.blocks) == (covered if has_kv else 0), "blocks do not match the KV"
    if segment.start % size and segment.blocks:
        assert segment.blocks[0] == parent.blocks[-1], "a cut block is not shared"
    assert segment.num_contexts or len(segment.children) != 1, "a run is in two segments"
    assert segment.num_kv_children == sum(bool(child.blocks) for child in segment.children)
    for level in Hold:
        below = sum(child.holds[level] > 0 for child in segment.children)
        assert segment.holds[level] >= below
    below = sum(child.holds[Hold.TOKENS] > 0 for child in segment.children)
    assert segment.holds[Hold.TOKENS] == below + segment.num_contexts
    assert all(low >= high for low, high in pairwise(segment.holds)), "levels include"
    if not segment.holds[Hold.TOKENS]:
        is_whole = segment.num_kept == segment.end and segment.end % size == 0
        assert segment.children or is_whole, "unheld tokens that nothing can match"
    boundary = segment.start - segment.start % size + size
    assert (segment.index_key is not None) == (segment.num_kept >= boundary)


def _check_away(segment: Segment, size: int) -> None:
    """Checks that what is away follows what is on the device, without a hole and not twice."""
    parent = segment.parent
    assert parent is not None
    for tier in LOWER_TIERS:
        num_children = sum(
            any(place.tier is tier for place in child.away) for child in segment.children
        )
        assert segment.num_away_children[tier] == num_children
    if not segment.away:
        return
    assert segment.num_computed < segment.kept_end <= segment.end
    assert segment.num_computed % size == 0 or segment.num_computed == segment.start
    assert len(segment.away) == -(-segment.kept_end // size) - segment.num_computed // size
    assert parent.is_root or parent.num_kept == parent.end, "KV away behind a hole"
    assert not segment.num_kv_children
