"""Counts and the free list."""

import pytest

from agentkv.core.block_pool import BlockPool


def test_lowest_ids_first() -> None:
    """Catches a long allocation scattered over the pool although a run of ids is free."""
    pool = BlockPool(6)
    assert pool.allocate(4) == [0, 1, 2, 3]
    pool.release([2, 0])
    assert pool.allocate(3) == [0, 2, 4]
    assert pool.num_free == 1
    pool.check()


def test_more_than_is_free() -> None:
    """Catches an allocation that hands out less than was asked for."""
    pool = BlockPool(2)
    assert pool.allocate(0) == []
    with pytest.raises(AssertionError):
        pool.allocate(3)
    assert pool.num_free == 2


def test_counts() -> None:
    """Catches a block freed while somebody still lists it."""
    pool = BlockPool(2)
    (block_id,) = pool.allocate(1)
    pool.acquire(block_id)
    assert pool.count(block_id) == 2
    assert pool.release([block_id]) == 0
    assert pool.release([block_id]) == 1
    with pytest.raises(AssertionError):
        pool.acquire(block_id)
    with pytest.raises(AssertionError):
        pool.release([block_id])
    pool.check()


def test_guarded_block_is_handed_out_only_after_the_step() -> None:
    """Catches the source of a copy given away as the target of another in the same step."""
    pool = BlockPool(3)
    freed, kept, free = pool.allocate(3)
    pool.release([free])
    pool.guard(freed)
    pool.guard(kept)
    assert pool.release([freed]) == 0
    assert pool.allocate(1) == [free]
    with pytest.raises(AssertionError):
        pool.check()
    pool.unguard()
    pool.check()
    assert pool.num_free == 1
    assert pool.allocate(1) == [freed]
    assert pool.count(kept) == 1


def test_check_finds_a_damaged_pool() -> None:
    """Catches an audit that audits nothing."""
    twice, counted = BlockPool(2), BlockPool(2)
    twice._free.append(0)
    with pytest.raises(AssertionError, match="twice"):
        twice.check()
    counted._counts[1] = 1
    with pytest.raises(AssertionError, match="counted"):
        counted.check()
