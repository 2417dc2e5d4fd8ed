"""Cases of kind B: every count is given back exactly once, in any order."""

from itertools import permutations

import pytest
from bench import TENANT, Bench, finish_of, numbers, tokens_of
from fakes import continuation

from agentkv.core.block_pool import BlockPool
from agentkv.core.request import FinishReason
from agentkv.errors import NotFound, PoolExhausted


def test_case_009_parent_reference_not_taken_on_fork() -> None:
    """Catches a fork whose child, or parent, loses its blocks with the other's release."""
    prompt = numbers(1, 20)
    for releases_child_first in (True, False):
        bench = Bench()
        parent = bench.create(prompt)
        (child,) = bench.fork(parent)
        first, second = (child, parent) if releases_child_first else (parent, child)
        bench.release(first)
        assert bench.generate(second, 4) == continuation(prompt, 4)
        bench.release(second)
        bench.engine.flush_cache()
        assert bench.free == bench.pool_view.total
        bench.end()


def test_case_009_middle_of_three_generations_released_first() -> None:
    """Catches lineage that holds blocks: a grandchild outlives its parent."""
    bench = Bench()
    prompt = numbers(1, 20)
    grandparent = bench.create(prompt)
    (parent,) = bench.fork(grandparent)
    bench.extend(parent, [1, 2])
    (child,) = bench.fork(parent)
    bench.release(parent)
    assert bench.generate(child, 4) == continuation([*prompt, 1, 2], 4)
    assert bench.generate(grandparent, 4) == continuation(prompt, 4)
    bench.end()


@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_case_010_release_order(order: tuple[int, ...]) -> None:
    """Catches bookkeeping that works only when releases mirror forks."""
    bench = Bench()
    p_tokens = numbers(2, 40)
    c1_tokens = p_tokens + numbers(3, 10)
    c2_tokens = c1_tokens + numbers(4, 3)
    p = bench.create(p_tokens)
    (c1,) = bench.fork(p)
    bench.extend(c1, c1_tokens[40:])
    (c2,) = bench.fork(c1)
    bench.extend(c2, c2_tokens[50:])
    contexts = {p: p_tokens, c1: c1_tokens, c2: c2_tokens}
    ids = list(contexts)
    for number in order:
        bench.release(ids[number])
        del contexts[ids[number]]
        for context, tokens in contexts.items():
            generated = bench.generate(context, 3)
            assert generated == continuation(tokens, 3)
            tokens.extend(generated)
        with pytest.raises(NotFound):
            bench.release(ids[number])
    bench.engine.flush_cache()
    assert bench.free == bench.pool_view.total
    bench.end()


def test_case_011_double_free_of_a_block_listed_twice_in_the_pool() -> None:
    """Catches a count per block instead of one per listing, and a release past zero."""
    pool = BlockPool(8)
    pool.allocate(8)
    pool.acquire(5)
    assert pool.release([5, 5, 7]) == 2
    assert pool.num_free == 2
    with pytest.raises(AssertionError):
        pool.release([4, 7])
    assert (pool.num_free, pool.count(4)) == (2, 1)
    pool.check()


@pytest.mark.parametrize("releases_parent_first", [True, False])
def test_case_011_double_free_of_a_block_that_a_split_cut(releases_parent_first: bool) -> None:
    """Catches a cut block given back once for two listings, or twice for one."""
    bench = Bench(block_size=4)
    prompt = numbers(5, 18)
    parent = bench.create(prompt)
    (child,) = bench.fork(parent, at=6)
    bench.extend(parent, numbers(6, 5))
    bench.extend(child, numbers(7, 5))
    first, second = (parent, child) if releases_parent_first else (child, parent)
    bench.release(first)
    bench.generate(second, 2)
    bench.release(second)
    bench.engine.flush_cache()
    assert bench.free == bench.pool_view.total


def test_case_013_eviction_zeroes_a_count() -> None:
    """Catches eviction that takes a block which a context still holds."""
    bench = Bench(num_blocks=6)
    a = bench.create(numbers(8, 32), pinned=True)
    bench.create(numbers(9, 64), pinned=True)
    blocks = bench.blocks(a)
    with pytest.raises(PoolExhausted) as refusal:
        bench.create(numbers(10, 16))
    metadata = refusal.value.metadata
    assert [metadata[name] for name in ("need", "free", "reclaimable")] == ["1", "0", "0"]
    assert bench.blocks(a) == blocks
    assert bench.generate(a, 1) == continuation(numbers(8, 32), 1)
    bench.end()


def test_case_013_evicting_one_of_two_equal_runs() -> None:
    """Catches eviction that frees the blocks of the equal run beside the evicted one."""
    bench = Bench()
    prompt = numbers(11, 32)
    operations = [bench.engine.contexts.create("tenant", prompt) for _ in range(2)]
    bench.drain()
    first, second = (operation.answer.context.id for operation in operations)
    assert set(bench.blocks(first)).isdisjoint(bench.blocks(second))
    kept = bench.blocks(second)
    bench.release(first)
    bench.engine.flush_cache()
    bench.audit()
    assert bench.blocks(second) == kept and bench.live == 2
    assert bench.generate(second, 4) == continuation(prompt, 4)
    bench.end()


def test_case_014_used_block_counter_never_falls() -> None:
    """Catches blocks that stay counted as live once they are cached."""
    bench = Bench(num_blocks=8)
    for turn in range(51):
        context = bench.create(numbers(100 + turn, 33))
        bench.generate(context, 2)
        bench.release(context)
        assert bench.live == 0
        assert bench.pool_view.cached + bench.free == 8
    bench.end()


def test_case_014_nobody_is_charged_for_what_is_cached() -> None:
    """Catches a bill that runs on after the release, or block-seconds that nobody is charged."""
    bench = Bench(num_blocks=8)
    for turn in range(20):
        context = bench.create(numbers(200 + turn, 33))
        bench.generate(context, 2)
        bench.now += 2.0
        bench.release(context)
        bench.now += 1.0
    usage = bench.engine.observer.usage(TENANT)
    (device,) = usage.tiers
    assert usage.bill.block_seconds[0] == device.held == 20 * 2.0 * 3
    assert device.taken == device.held + device.unheld
    assert usage.bill.computed_tokens == 20 * 34
    assert usage.bill.generated_tokens == 40
    assert (usage.bill.recomputed_tokens, usage.bill.reused_tokens) == (0, 0)
    assert usage.num_contexts == 0
    bench.end()


def test_case_016_failed_growth_throws_away_what_was_held() -> None:
    """Catches a rollback of more than the failed call took."""
    bench = Bench(num_blocks=6, block_size=4)
    prompt = numbers(12, 16)
    a = bench.create(prompt, pinned=True)
    d = bench.create(numbers(13, 4), pinned=True)
    with pytest.raises(PoolExhausted) as refusal:
        bench.extend(a, [1, 2, 3, 4, 5])
    assert (refusal.value.metadata["need"], refusal.value.metadata["free"]) == ("2", "1")
    assert (bench.length(a), len(bench.blocks(a)), bench.free) == (16, 4, 1)
    bench.release(d)
    bench.extend(a, [1, 2, 3, 4, 5])
    assert (bench.length(a), len(bench.blocks(a))) == (21, 6)
    assert bench.generate(a, 1) == continuation([*prompt, 1, 2, 3, 4, 5], 1)
    bench.release(a)
    bench.engine.flush_cache()
    assert bench.free == 6


@pytest.mark.parametrize("length", [14, 15, 16])
@pytest.mark.parametrize("has_neighbours", [False, True])
def test_case_017_look_ahead_slot_freed_twice(length: int, has_neighbours: bool) -> None:
    """Catches a block taken for a token that is never computed, and one given back twice."""
    bench = Bench(chunk=8, budget=16)
    prompt = numbers(14, length)
    context = bench.create(prompt)
    neighbours = []
    if has_neighbours:
        neighbours = [bench.engine.contexts.create("tenant", numbers(15 + n, 40)) for n in range(2)]
    expected = continuation(prompt, 2)
    updates = bench.finish(bench.start(context, 50, stop_token_ids=(expected[1],)))
    assert tokens_of(updates) == expected
    assert finish_of(updates).reason is FinishReason.STOP
    assert bench.length(context) == length + 2
    num_computed = bench.view(context).num_computed
    assert num_computed == length + 1
    assert len(bench.blocks(context)) == -(-num_computed // 16)
    bench.drain()
    assert all(operation.is_done for operation in neighbours)
    bench.release(context)
    bench.end()
