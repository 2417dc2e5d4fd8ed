"""Takes KV off the device when its blocks are needed: to the host, on to disk, or away for good.

Tokens stay, unless nobody holds them. What is moved is only noted here, as `BlockMove`s; the model
does it before the next step's copies and writes. Who gives way, and when, is `admission`.
"""

from collections.abc import Iterable

from agentkv.core import prefix_match
from agentkv.core.block_move import LOWER_TIERS, BlockMove, Place, Tier
from agentkv.core.context_tree import ContextTree
from agentkv.core.lower_tiers import Rank
from agentkv.core.segment import Hold, Segment


def evict(tree: ContextTree, num_free: int, *, moves: bool = True) -> bool:
    """Takes KV that nobody holds firmly off the device, least recently used leaf first.

    Args:
        tree: Whose KV.
        num_free: Blocks that shall be free at the end.
        moves: Whether it goes to a lower tier where that pays.

    Returns:
        Whether so much is free now.
    """
    while tree.pool.num_free < num_free:
        leaf = tree.residency.pop_leaf()
        if leaf is None:
            return False
        shed(tree, leaf, num_free - tree.pool.num_free, moves=moves)
    return True


def shed(tree: ContextTree, leaf: Segment, num_blocks: int, *, moves: bool = True) -> None:
    """Takes up to `num_blocks` blocks at the end of a leaf off the device.

    They go to the host where that pays and those who are used more recently leave room; what finds
    no room there is dropped, tokens too if unheld.
    """
    num_taken = _make_host_room(tree, leaf, num_blocks) if moves else 0
    if not leaf.blocks:  # its last child but one was evicted for that, and both are one now
        return
    size = tree.block_size
    kept = max(0, len(leaf.blocks) - num_blocks)
    boundary = max(leaf.start, (leaf.start // size + kept) * size)
    leaving = leaf.blocks[kept:]
    taken = [tree.lower.move(Place(Tier.DEVICE, b), Tier.HOST) for b in leaving[:num_taken]]
    kept_end, behind, orphans = leaf.num_kept, tree.lower.take_off(leaf), []
    if len(taken) < len(leaving):
        kept_end = (boundary // size + len(taken)) * size
        tree.lower.release(behind)
        behind, orphans = [], _forget_below(tree, leaf)
    tree.strip(leaf, boundary)
    if taken or behind:
        tree.lower.set_away(leaf, taken + behind, kept_end)
        prefix_match.index(leaf, size)
    _retire_all(tree, [*orphans, leaf])
    if tree.is_part(leaf):
        tree.residency.offer(leaf)


def move_out(tree: ContextTree, leaf: Segment) -> bool:
    """Takes as much of a leaf off the device as the host has room for; returns if that was all."""
    num_taken = _make_host_room(tree, leaf, len(leaf.blocks))
    if num_taken and leaf.blocks:
        shed(tree, leaf, min(num_taken, len(leaf.blocks)))
    return not leaf.blocks


def flush(tree: ContextTree) -> None:
    """Drops what gave way on the device, and what no context holds in the other tiers."""
    evict(tree, tree.pool.num_blocks - tree.residency.held[Hold.KV], moves=False)
    for segment in reversed(list(tree)):
        if segment.away and not segment.holds[Hold.TOKENS]:
            _drop_away(tree, segment, 0)
            _retire_all(tree, [segment])


def bring_back(tree: ContextTree, tail: Segment) -> bool:
    """Takes blocks for all KV of a settled path that is in a lower tier, and moves it there.

    Returns:
        Whether there was any.
    """
    found = [segment for segment in tree.path(tail) if segment.away]
    for segment in found:
        assert segment.blocks or segment.start % tree.block_size == 0, "not settled"
        kept_end, places = segment.kept_end, tree.lower.take_off(segment)
        block_ids = tree.pool.allocate(len(places))
        for place, block_id in zip(places, block_ids, strict=True):
            tree.lower.moves.append(BlockMove(place, Place(Tier.DEVICE, block_id)))
        tree.residency.grow(segment, block_ids)
        tree.residency.set_computed(segment, kept_end)
        tree.lower.release(places)
    return bool(found)


def forget(tree: ContextTree, lost: Iterable[Place]) -> None:
    """Drops KV that turned out to be lost, and all behind it: it is recomputed at the next use.

    Costs a walk over all segments.
    """
    places = set(lost)
    for segment in list(tree):
        if not tree.is_part(segment):
            continue
        blocks = [Place(Tier.DEVICE, block_id) in places for block_id in segment.blocks]
        orphans: list[Segment] = []
        if any(blocks):
            boundary = (segment.start // tree.block_size + blocks.index(True)) * tree.block_size
            orphans = list(tree.walk(segment))[:0:-1]  # children first
            for node in [*orphans, segment]:
                tree.lower.release(tree.lower.take_off(node))
                tree.strip(node, node.start if node is not segment else max(node.start, boundary))
        away = [place in places for place in segment.away]
        if any(away):
            orphans += _drop_away(tree, segment, away.index(True))
        _retire_all(tree, [*orphans, segment] if orphans or any(blocks) or any(away) else [])


def _make_host_room(tree: ContextTree, leaf: Segment, num_blocks: int) -> int:
    """Finds how many blocks of a leaf the host takes; what ranks below it gives way there."""
    if not tree.lower.takes_blocks:
        return 0
    pool = tree.lower.pools[Tier.HOST]
    wanted = min(num_blocks, pool.num_blocks)
    _evict_away(tree, Tier.HOST, wanted, Rank.of(leaf))
    return min(wanted, pool.num_free)


def _evict_away(tree: ContextTree, tier: Tier, num_free: int, bound: Rank) -> None:
    pool = tree.lower.pools[tier]
    while pool.num_free < num_free:
        leaf = tree.lower.pop_leaf(tier, bound)
        if leaf is None:
            return
        _shed_away(tree, leaf, tier)


def _shed_away(tree: ContextTree, leaf: Segment, tier: Tier) -> None:
    """Moves the last block that a leaf has in a tier to the next one, or drops it."""
    disk = tree.lower.pools[Tier.DISK]
    goes_on = tier is Tier.HOST and disk.num_blocks > 0
    if goes_on:
        _evict_away(tree, Tier.DISK, 1, Rank.of(leaf))
    index = max((i for i, place in enumerate(leaf.away) if place.tier is tier), default=None)
    if index is None:  # joined with a child meanwhile
        return
    if goes_on and disk.num_free:
        place, away = leaf.away[index], list(leaf.away)
        away[index] = tree.lower.move(place, Tier.DISK)
        tree.lower.set_away(leaf, away, leaf.kept_end)
        tree.lower.release([place])
    else:
        orphans = _drop_away(tree, leaf, index)
        _retire_all(tree, [*orphans, leaf])


def _drop_away(tree: ContextTree, segment: Segment, num_kept: int) -> list[Segment]:
    """Drops what a segment has away but `num_kept` blocks; returns who may have to be retired."""
    size = tree.block_size
    gone = segment.away[num_kept:]
    orphans = _forget_below(tree, segment)
    kept_end = (segment.num_computed // size + num_kept) * size
    tree.lower.set_away(segment, segment.away[:num_kept], kept_end)
    tree.lower.release(gone)
    _unindex_if_short(tree, segment)
    return orphans


def _forget_below(tree: ContextTree, segment: Segment) -> list[Segment]:
    """Drops what is away below a segment that loses KV; returns who may have to be retired."""
    if not any(segment.num_away_children[tier] for tier in LOWER_TIERS):
        return []
    below = [node for node in reversed(list(tree.walk(segment))) if node is not segment]
    for node in below:
        tree.lower.release(tree.lower.take_off(node))
        _unindex_if_short(tree, node)
    return below


def _retire_all(tree: ContextTree, segments: Iterable[Segment]) -> None:
    """Lets go of tokens that nobody holds and that have no KV any more, children first."""
    for segment in segments:
        if tree.is_part(segment) and not segment.holds[Hold.TOKENS]:
            tree.retire(segment)


def _unindex_if_short(tree: ContextTree, segment: Segment) -> None:
    boundary = segment.start - segment.start % tree.block_size + tree.block_size
    if segment.num_kept < boundary:
        prefix_match.unindex(segment)
