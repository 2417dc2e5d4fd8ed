"""Holds per level, and the queue of what may be evicted."""

from bench import Bench, numbers

from agentkv.core.eviction import evict


def test_queue_of_leaves_is_bounded() -> None:
    """Catches a queue that gathers an entry per request for as long as nothing is evicted."""
    bench = Bench(num_blocks=8)
    for turn in range(100):
        bench.release(bench.create([*numbers(1, 18), turn]))
    assert bench.pool_view.cached == 1
    assert len(bench.tree.residency._leaves) <= 2 * 8 + 1
    bench.release(bench.create(numbers(2, 128)))
    assert bench.pool_view.cached == 8
    bench.end()


def test_compacting_the_queue_loses_no_leaf() -> None:
    """Catches a leaf that can never be evicted, or too early, once stale entries were dropped."""
    bench = Bench(num_blocks=8)
    kept = [bench.create(numbers(seed, 16)) for seed in range(4)]
    bench.release(*kept)
    for turn in range(100):  # uses the first of them again and again
        bench.release(bench.create([*numbers(0, 16), turn]))
    assert evict(bench.tree, bench.free + 3)
    assert bench.created(numbers(0, 16)).usage.cached_tokens == 15
    bench.end()


def test_counters_per_level() -> None:
    """Catches blocks counted per context instead of once, and those of a path counted in part."""
    bench = Bench()
    context = bench.create(numbers(1, 40))
    children = bench.fork(context, 3)
    assert bench.tree.residency.held == [3, 3, 0, 0]
    stream = bench.start(children[0], 3)
    bench.step()
    assert bench.tree.residency.held == [3, 3, 3, 0]
    bench.step()
    assert bench.tree.residency.held == [4, 4, 3, 0], "the copy, and the path above it"
    bench.finish(stream)
    bench.create(numbers(2, 20), pinned=True)
    assert bench.tree.residency.held == [6, 6, 2, 2]
    assert bench.pool_view.pinned == 2
    bench.end()
