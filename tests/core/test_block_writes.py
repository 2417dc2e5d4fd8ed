"""What a step needs, and copy-on-write."""

from array import array

import pytest

from agentkv.core.batch import BlockCopy
from agentkv.core.block_pool import BlockPool
from agentkv.core.block_writes import (
    apply_writes,
    commit_writes,
    plan_writes,
    roll_back_writes,
    settle,
)
from agentkv.core.context_tree import ContextTree
from agentkv.core.segment import Hold, Segment

B = 4


def path(length: int, num_blocks: int = 16) -> tuple[ContextTree, Segment]:
    """A tree with one computed context."""
    tree = ContextTree(BlockPool(num_blocks), block_size=B)
    tail, _ = tree.open("t", array("I", range(length)), Hold.KV)
    write(tree, tail, length)
    return tree, tail


def write(tree: ContextTree, tail: Segment, upto: int | None = None) -> list[BlockCopy]:
    """Computes a path up to a position; returns the copies that took."""
    upto = tail.end if upto is None else upto
    settle(tree, tail)
    copies = apply_writes(tree, plan_writes(tree, tail, upto))
    commit_writes(tree, tail, upto)
    tree.pool.unguard()
    tree.check()
    return copies


def need(tree: ContextTree, tail: Segment, upto: int | None = None) -> int:
    """Blocks that computing a path up to a position takes."""
    settle(tree, tail)
    return plan_writes(tree, tail, tail.end if upto is None else upto).num_blocks


def branch(tree: ContextTree, tail: Segment, at: int, tokens: list[int]) -> Segment:
    """Forks a context and appends to the child."""
    parent = tree.fork(tail, at)
    tree.attach(parent, Hold.KV)
    child = tree.append(parent, tokens, Hold.KV)
    tree.check()
    return child


@pytest.mark.parametrize(
    ("length", "more", "blocks"), [(4, 1, 1), (5, 3, 0), (5, 4, 1), (7, 1, 0), (8, 8, 2), (3, 0, 0)]
)
def test_growth_in_place(length: int, more: int, blocks: int) -> None:
    """Catches a block too many or too few at a boundary."""
    tree, tail = path(length)
    tail = tree.append(tail, [9] * more, Hold.KV)
    assert need(tree, tail) == blocks
    free = tree.pool.num_free
    assert write(tree, tail) == []
    assert tree.pool.num_free == free - blocks


def test_chunks_take_only_what_they_write() -> None:
    """Catches a long prompt that takes all its blocks with its first chunk."""
    tree = ContextTree(BlockPool(16), block_size=B)
    tail, _ = tree.open("t", array("I", range(12)), Hold.KV)
    assert [need(tree, tail, upto) for upto in (3, 4, 5, 12)] == [1, 1, 2, 3]
    write(tree, tail, 6)
    assert (len(tail.blocks), tail.num_computed) == (2, 6)
    assert need(tree, tail, 8) == 0


def test_first_write_below_a_shared_block_copies() -> None:
    """Catches a write into a block that others read, and a copy of too many tokens."""
    tree, tail = path(10)
    child = branch(tree, tail, 10, [7])
    assert need(tree, child) == 1
    assert write(tree, child) == [BlockCopy(2, 3, 2)]
    assert tree.pool.count(2) == tree.pool.count(3) == 1
    other = branch(tree, tail, 9, [7])
    assert write(tree, other) == [BlockCopy(2, 4, 1)]


def test_planning_changes_nothing() -> None:
    """Catches a plan that takes blocks: a refusal must leave no trace."""
    tree, tail = path(10)
    child = branch(tree, tail, 10, [7] * 9)
    before = tree.pool.num_free, list(tree.tokens(child)), child.block_ids
    settle(tree, child)
    planned = plan_writes(tree, child, child.end)
    assert planned.num_blocks == 3
    assert (tree.pool.num_free, list(tree.tokens(child)), child.block_ids) == before
    tree.check()


def test_fork_at_a_boundary_copies_nothing() -> None:
    """Catches a copy where nothing is shared but whole blocks."""
    tree, tail = path(10)
    child = branch(tree, tail, 8, [7])
    assert need(tree, child) == 1
    assert write(tree, child) == []


def test_last_holder_writes_in_place() -> None:
    """Catches a copy for a block that nobody else counts on any more."""
    tree, tail = path(10)
    child = branch(tree, tail, 10, [7])
    tree.detach(tail, Hold.KV)
    assert need(tree, child) == 0
    assert write(tree, child) == []
    assert child.block_ids == (0, 1, 2)


def test_last_holder_drops_cache_that_is_in_its_way() -> None:
    """Catches a copy for the sake of cache that nobody holds."""
    tree, tail = path(12)
    child = branch(tree, tail, 10, [7])
    tree.detach(tail, Hold.KV)
    assert tree.residency.num_reclaimable == 0, "the last block is cut, and so held"
    assert write(tree, child) == []
    assert list(tree.tokens(child)) == [*range(10), 7]
    assert child.block_ids == (0, 1, 2)


def test_a_living_sibling_below_is_no_cache() -> None:
    """Catches a holder taken for cache because no context ends at the shared segment."""
    tree, tail = path(10)
    one, two = branch(tree, tail, 10, [7]), branch(tree, tail, 10, [8])
    tree.detach(tail, Hold.KV)
    assert write(tree, one) == [BlockCopy(2, 3, 2)]
    assert write(tree, two) == [], "now it is the last holder"


def test_block_that_a_sibling_still_fills() -> None:
    """Catches a branch that waits for, or computes again, what its parent has of a block."""
    tree, tail = path(9)
    tail = tree.append(tail, [20], Hold.KV)  # sampled: no KV yet
    child = branch(tree, tail, 10, [7])
    assert need(tree, child) == 1
    assert write(tree, child) == [BlockCopy(2, 3, 1)]
    assert (child.start, list(child.tokens)) == (8, [8, 20, 7])
    assert tail.num_computed == 9


def test_shared_tokens_without_any_kv_in_their_block() -> None:
    """Catches a copy of nothing: the branch computes those tokens in a block of its own."""
    tree, tail = path(8)
    tail = tree.append(tail, [20], Hold.KV)
    child = branch(tree, tail, 9, [7])
    assert need(tree, child) == 1
    assert write(tree, child) == []
    assert (child.start, list(child.tokens)) == (8, [20, 7])
    assert tail.num_computed == 8


def test_source_of_a_copy_is_guarded() -> None:
    """Catches a source that another copy of the step may get as its target."""
    tree, tail = path(10, num_blocks=4)
    child = branch(tree, tail, 10, [7])
    settle(tree, child)
    (copy,) = apply_writes(tree, plan_writes(tree, child, 11))
    tree.detach(tail, Hold.KV)
    assert tree.pool.count(copy.src_block_id) == 0
    assert tree.pool.num_free == 0
    commit_writes(tree, child, 11)
    tree.pool.unguard()
    assert tree.pool.num_free == 1
    tree.check()


def test_roll_back_of_plain_growth() -> None:
    """Catches blocks of a failed step that stay taken."""
    tree, tail = path(6)
    tail = tree.append(tail, [9] * 6, Hold.KV)
    free = tree.pool.num_free
    settle(tree, tail)
    apply_writes(tree, plan_writes(tree, tail, tail.end))
    roll_back_writes(tree, tail, ())
    tree.check()
    assert (tree.pool.num_free, tail.num_computed) == (free, 6)


def test_roll_back_of_a_copy() -> None:
    """Catches a torn copy kept as KV, or a source harmed with it."""
    tree, tail = path(10)
    child = branch(tree, tail, 10, [7])
    free = tree.pool.num_free
    settle(tree, child)
    copies = apply_writes(tree, plan_writes(tree, child, 11))
    roll_back_writes(tree, child, copies)
    tree.pool.unguard()
    tree.check()
    assert tree.pool.num_free == free
    assert (tree.num_computed(child), tail.num_computed) == (8, 10)
    assert list(tree.tokens(child)) == [*range(10), 7]


def test_roll_back_spares_what_others_have_computed_below() -> None:
    """Catches KV taken from under a branch that counts on it."""
    tree, tail = path(8)
    child = branch(tree, tail, 8, [7])
    write(tree, child)
    roll_back_writes(tree, tail, ())
    tree.check()
    assert tail.num_computed == 8


def test_rows_that_run_again_leave_what_has_kv() -> None:
    """Catches KV above the last row forgotten, when prompt log-probabilities run rows again."""
    tree, tail = path(12)
    tail = tree.append(tail, [9] * 5, Hold.KV)
    commit_writes(tree, tail, 7)
    assert tree.num_computed(tail) == 12
    tree.check()
