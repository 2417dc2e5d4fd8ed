"""Shape: fork, split, join, truncate, and what stays as prefix cache."""

from array import array
from collections.abc import Callable

import pytest

from agentkv.core.block_pool import BlockPool
from agentkv.core.block_writes import apply_writes, commit_writes, plan_writes, settle
from agentkv.core.context_tree import ContextTree
from agentkv.core.eviction import evict, flush, shed
from agentkv.core.segment import Hold, Segment
from agentkv.core.tree_shape import rehang

B = 4


def make_tree(num_blocks: int = 64) -> ContextTree:
    """An empty tree."""
    return ContextTree(BlockPool(num_blocks), block_size=B)


def compute(tree: ContextTree, tail: Segment) -> None:
    """Gives a path its KV."""
    settle(tree, tail)
    planned = plan_writes(tree, tail, tail.end)
    assert planned.num_blocks <= tree.pool.num_free
    apply_writes(tree, planned)
    commit_writes(tree, tail, tail.end)
    tree.pool.unguard()
    tree.check()


def add(tree: ContextTree, tokens: list[int], hold: Hold = Hold.KV) -> Segment:
    """Opens a path and computes it."""
    tail, _ = tree.open("t", array("I", tokens), hold)
    compute(tree, tail)
    return tail


def fork(tree: ContextTree, tail: Segment, position: int) -> Segment:
    """Forks a context at a position."""
    target = tree.fork(tail, position)
    tree.attach(target, Hold.KV)
    tree.check()
    return target


def test_the_picture_in_the_docstring() -> None:
    """Catches a fork that allocates, and a writer that does not leave the shared block."""
    tree = make_tree()
    a = add(tree, list(range(10)))
    assert a.block_ids == (0, 1, 2)
    b = fork(tree, a, 10)
    c = fork(tree, a, 8)
    assert b is a and tree.pool.num_free == 61
    tail = tree.append(b, [10], Hold.KV)
    compute(tree, tail)
    assert (tail.start, list(tail.tokens), tail.block_ids) == (8, [8, 9, 10], (3,))
    assert c.block_ids == (0, 1) and c.end == 8
    assert [list(tree.tokens(end)) for end in (a, tail, c)] == [
        list(range(10)),
        list(range(11)),
        list(range(8)),
    ]
    assert repr(tail) == f"<Segment {tail.id} [8, 11) blocks [3]>"


@pytest.mark.parametrize("position", range(1, 11))
def test_split_and_join_are_inverse(position: int) -> None:
    """Catches tokens, blocks or counts lost where a path is cut and grown together again."""
    tree = make_tree()
    tail = add(tree, list(range(11)))
    before = (list(tail.tokens), list(tail.blocks), tail.num_computed)
    upper = fork(tree, tail, position)
    assert upper.end == tail.start == position
    assert list(tree.tokens(tail)) == before[0]
    assert upper.blocks[-1] == tail.blocks[0] or position % B == 0
    tree.detach(upper, Hold.KV)
    tree.check()
    assert (list(tail.tokens), list(tail.blocks), tail.num_computed) == before
    tree.detach(tail, Hold.KV)
    flush(tree)
    tree.check()
    assert tree.pool.num_free == 64 and list(tree) == []


def test_split_of_a_path_without_kv() -> None:
    """Catches blocks given to the part that has no KV."""
    tree = make_tree()
    tail, _ = tree.open("t", array("I", range(8)), Hold.KV)
    upper = fork(tree, tail, 3)
    assert upper.blocks == tail.blocks == []
    assert (upper.num_computed, tail.num_computed) == (0, 3)
    assert tree.num_computed(tail) == 0


def test_fork_finds_the_segment_that_ends_there() -> None:
    """Catches a split where there is a boundary already, and one at the root."""
    tree = make_tree()
    tail = add(tree, list(range(8)))
    upper = fork(tree, tail, 4)
    assert tree.fork(tail, 4) is upper
    assert tree.fork(tail, 8) is tail
    assert tree.fork(tail, 0) is tree.root("t")


def test_truncate_in_place_and_back() -> None:
    """Catches a pointer move that touches the tokens it leaves behind."""
    tree = make_tree()
    tail = add(tree, list(range(10)))
    assert tree.truncate(tail, 10, Hold.KV) is tail
    cut = tree.truncate(tail, 5, Hold.KV)
    tree.check()
    assert list(tree.tokens(cut)) == list(range(5))
    assert tree.residency.num_reclaimable == 0, "a part of a block behind the cut is no cache"
    root = tree.truncate(cut, 0, Hold.KV)
    tree.check()
    assert root.is_root and tree.residency.num_reclaimable == 2


def test_release_keeps_whole_blocks_as_cache() -> None:
    """Catches a partly filled block kept for nobody, and whole ones that cannot be found."""
    tree = make_tree()
    tree.detach(add(tree, list(range(10))), Hold.KV)
    tree.check()
    assert tree.pool.num_free == 62 and tree.residency.num_reclaimable == 2
    tail, num_cached = tree.open("t", array("I", range(10)), Hold.KV)
    assert num_cached == 8
    assert list(tree.tokens(tail)) == list(range(10))
    tree.check()


def test_release_without_kv_leaves_nothing() -> None:
    """Catches tokens without KV kept as if they were cache."""
    tree = make_tree()
    tail, _ = tree.open("t", array("I", range(10)), Hold.KV)
    tree.detach(tail, Hold.KV)
    tree.check()
    assert list(tree) == []


def test_roots_share_nothing() -> None:
    """Catches a match across tenants."""
    tree = make_tree()
    add(tree, list(range(8)))
    _, num_cached = tree.open("u", array("I", range(8)), Hold.KV)
    assert num_cached == 0


def test_eviction_takes_the_least_recently_used_leaf() -> None:
    """Catches eviction in the order of creation, or of a segment before what hangs below it."""
    tree = make_tree(8)
    first = add(tree, [1] * 8)
    second = add(tree, [2] * 8)
    tree.detach(second, Hold.KV)
    tree.detach(first, Hold.KV)
    tree.touch(second)
    assert evict(tree, 5)
    assert (len(first.blocks), len(second.blocks)) == (1, 2)
    assert evict(tree, 6)
    assert (len(first.blocks), len(second.blocks)) == (0, 2)
    tree.check()
    assert evict(tree, 8) and not evict(tree, 9)
    assert list(tree) == []


def test_eviction_of_a_held_path_keeps_its_tokens() -> None:
    """Catches tokens that go with their KV: a handle keeps them."""
    tree = make_tree()
    tail = add(tree, list(range(10)), Hold.KV)
    tree.rehold(tail, Hold.KV, Hold.TOKENS)
    assert evict(tree, 62)
    tree.check()
    assert (tail.num_computed, tail.end) == (8, 10)
    assert evict(tree, 64)
    tree.check()
    assert list(tree.tokens(tail)) == list(range(10))
    compute(tree, tail)


def test_rehold_moves_whole_paths_between_levels() -> None:
    """Catches blocks counted twice, or not at all, on a shared part of a path."""
    tree = make_tree()
    a = add(tree, list(range(8)))
    b = tree.append(fork(tree, a, 8), [8, 9, 10, 11], Hold.KV)
    compute(tree, b)
    held = tree.residency.held
    assert held == [3, 3, 0, 0]
    tree.rehold(b, Hold.KV, Hold.PINNED)
    assert held == [3, 3, 3, 3]
    tree.rehold(a, Hold.KV, Hold.FIRM)
    tree.rehold(b, Hold.PINNED, Hold.TOKENS)
    assert held == [3, 2, 2, 0]
    tree.rehold(a, Hold.FIRM, Hold.FIRM)
    tree.check()


def test_attach_of_none() -> None:
    """Catches a hold without a holder."""
    tree = make_tree()
    tail = add(tree, list(range(8)))
    tree.attach(tail, Hold.KV, 0)
    tree.check()
    assert tail.num_contexts == 1


def test_reading_tokens_of_a_path() -> None:
    """Catches positions counted from a segment's start instead of the path's."""
    tree = make_tree()
    tail = add(tree, [10 + n for n in range(11)])
    fork(tree, tail, 3)
    fork(tree, tail, 7)
    assert [tree.token_at(tail, position) for position in (0, 2, 3, 6, 7, 10)] == [
        10,
        12,
        13,
        16,
        17,
        20,
    ]
    assert list(tree.tokens(tail, 2, 8)) == [12, 13, 14, 15, 16, 17]
    assert list(tree.last_tokens(tail, 6)) == [15, 16, 17, 18, 19, 20]
    assert list(tree.last_tokens(tail, 99)) == [10 + n for n in range(11)]


def test_rehang_keeps_the_tokens_of_the_path() -> None:
    """Catches tokens lost or doubled when a branch stops counting on its siblings' block."""
    tree = make_tree()
    trunk = add(tree, list(range(11)))
    upper = fork(tree, trunk, 6)
    branch = tree.append(upper, [60, 61], Hold.KV)
    tree.attach(upper, Hold.KV)
    tree.check()
    rehang(tree, branch, 4)
    tree.check()
    assert branch.start == 4 and list(branch.tokens) == [4, 5, 60, 61]
    assert list(tree.tokens(branch)) == [0, 1, 2, 3, 4, 5, 60, 61]
    rehang(tree, branch, 0)
    tree.check()
    assert branch.parent is tree.root("t")
    assert list(tree.tokens(trunk)) == list(range(11))


def test_a_stale_leaf_entry_is_sorted_in_again() -> None:
    """Catches a leaf that can never be evicted because it was used after it was queued."""
    tree = make_tree()
    a, b = add(tree, [1] * 4), add(tree, [2] * 4)
    tree.detach(a, Hold.KV)
    tree.detach(b, Hold.KV)
    tree.touch(a)
    for expected in (b, a):
        leaf = tree.residency.pop_leaf()
        assert leaf is expected
        shed(tree, leaf, 1)
    assert tree.residency.pop_leaf() is None


def test_check_finds_damage() -> None:
    """Catches an audit that audits nothing: each damage must be found."""
    damages: list[Callable[[ContextTree, Segment], object]] = [
        lambda tree, tail: tail.holds.__setitem__(Hold.TOKENS, 5),
        lambda tree, tail: setattr(tail, "num_computed", 3),
        lambda tree, tail: setattr(tail, "index_key", None),
        lambda tree, tail: tail.blocks.pop(),
        lambda tree, tail: tree.residency.held.__setitem__(Hold.KV, 0),
        lambda tree, tail: setattr(tree.residency, "used_slots", 0),
        lambda tree, tail: setattr(tail, "num_kv_children", 1),
        lambda tree, tail: setattr(tail, "start", 1),
        lambda tree, tail: tree.pool.acquire(0),
    ]
    for damage in damages:
        tree = make_tree()
        tail = add(tree, list(range(8)))
        damage(tree, tail)
        with pytest.raises(AssertionError):
            tree.check()
