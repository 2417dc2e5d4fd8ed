"""The longest cached prefix, in whole blocks, of these very tokens."""

from array import array

import pytest

from agentkv.core import prefix_match
from agentkv.core.block_pool import BlockPool
from agentkv.core.block_writes import apply_writes, commit_writes, plan_writes, settle
from agentkv.core.context_tree import ContextTree
from agentkv.core.prefix_match import longest_match
from agentkv.core.segment import Hold, Segment

B = 4


def make_tree() -> ContextTree:
    """An empty tree."""
    return ContextTree(BlockPool(64), block_size=B)


def add(tree: ContextTree, tokens: list[int], upto: int | None = None) -> Segment:
    """Opens a path and computes it up to a position."""
    tail, _ = tree.open("t", array("I", tokens), Hold.KV)
    upto = tail.end if upto is None else upto
    settle(tree, tail)
    apply_writes(tree, plan_writes(tree, tail, upto))
    commit_writes(tree, tail, upto)
    tree.check()
    return tail


@pytest.mark.parametrize(
    ("tokens", "length"),
    [
        ([1, 2, 3, 4, 5, 6, 7, 8, 9, 10], 8),
        ([1, 2, 3, 4, 5, 6, 7, 8], 8),
        ([1, 2, 3, 4, 5, 6, 7], 4),
        ([1, 2, 3, 4, 5, 6, 7, 9], 4),
        ([1, 2, 3, 4], 4),
        ([1, 2, 3], 0),
        ([1, 2, 3, 5], 0),
        ([2, 2, 3, 4], 0),
        ([], 0),
    ],
)
def test_whole_blocks_of_equal_tokens(tokens: list[int], length: int) -> None:
    """Catches a match of part of a block, or past the first token that differs."""
    tree = make_tree()
    add(tree, list(range(1, 11)))
    match = longest_match(tree.root("t"), array("I", tokens), B)
    assert match.length == length
    assert match.segment.end >= length


def test_what_has_no_kv_is_not_matched() -> None:
    """Catches a match of tokens that a step is only going to compute."""
    tree = make_tree()
    add(tree, list(range(1, 13)), upto=6)
    assert longest_match(tree.root("t"), array("I", range(1, 13)), B).length == 4


def test_equal_siblings_are_all_followed() -> None:
    """Catches a shorter match because the first of two equal beginnings was taken."""
    tree = make_tree()
    first, _ = tree.open("t", array("I", [1, 2, 3, 4, 5, 6, 7, 8]), Hold.KV)
    second, _ = tree.open("t", array("I", [1, 2, 3, 4, 9, 9, 9, 9]), Hold.KV)
    for tail in (first, second):
        settle(tree, tail)
        apply_writes(tree, plan_writes(tree, tail, tail.end))
        commit_writes(tree, tail, tail.end)
    tree.check()
    for tail in (first, second):
        match = longest_match(tree.root("t"), tree.tokens(tail), B)
        assert match == (tail, 8)


def test_match_across_a_fork_inside_a_block() -> None:
    """Catches paths that part inside a block and then cannot be matched beyond it."""
    tree = make_tree()
    trunk = add(tree, [1, 2, 3, 4, 5, 6])
    tree.attach(trunk, Hold.KV, 1)
    tails = []
    for new in ([7, 8, 9], [7, 7, 7]):
        tail = tree.append(trunk, new, Hold.KV)
        settle(tree, tail)
        apply_writes(tree, plan_writes(tree, tail, tail.end))
        commit_writes(tree, tail, tail.end)
        tails.append(tail)
        tree.pool.unguard()
    tree.check()
    assert longest_match(tree.root("t"), array("I", [1, 2, 3, 4, 5, 6, 7, 8, 1]), B).length == 8
    assert longest_match(tree.root("t"), array("I", [1, 2, 3, 4, 5, 6, 7, 7, 1]), B).length == 8
    assert longest_match(tree.root("t"), array("I", [1, 2, 3, 4, 5, 6, 8, 8, 1]), B).length == 4


def test_index_is_kept_per_boundary() -> None:
    """Catches a segment listed before its block is whole, twice, or after it has gone."""
    tree = make_tree()
    tail = add(tree, [1, 2, 3], upto=3)
    root = tree.root("t")
    assert root.index == {}
    prefix_match.unindex(tail)
    prefix_match.index(root, B)
    assert root.index == {} and root.index_key is None
    tail = tree.append(tail, [4, 5], Hold.KV)
    apply_writes(tree, plan_writes(tree, tail, 5))
    commit_writes(tree, tail, 5)
    assert list(root.index) == [array("I", [1, 2, 3, 4]).tobytes()]
    prefix_match.unindex(tail)
    assert root.index == {}
    prefix_match.index(tail, B)
    tree.check()
