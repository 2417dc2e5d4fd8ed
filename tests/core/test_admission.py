"""What is possible, what may start, and who makes room."""

import pytest
from bench import TENANT, Bench, numbers
from fakes import continuation

from agentkv.errors import PoolExhausted


def test_what_needs_no_block_is_possible_beyond_the_watermark() -> None:
    """Catches a context that grew into the watermark and can never be used again."""
    bench = Bench(num_blocks=9, block_size=1, watermark=1)
    prompt = numbers(1, 8)
    context = bench.create(prompt)
    assert bench.generate(context, 2) == continuation(prompt, 2)
    (branch,) = bench.fork(context, at=9)
    bench.truncate(context, 9)
    path = prompt + continuation(prompt, 1)
    assert bench.generate(branch, 1) == continuation(path, 1)
    assert bench.generate(context, 1) == continuation(path, 1)
    with pytest.raises(PoolExhausted) as refusal:
        bench.extend(branch, [1])
    metadata = refusal.value.metadata
    assert [metadata[name] for name in ("free", "reclaimable")] == ["0", "0"]
    bench.end()


def test_numbers_of_a_refusal() -> None:
    """Catches numbers that count what the request itself stands on as reclaimable."""
    bench = Bench(num_blocks=6, block_size=4)
    context = bench.create(numbers(1, 12))
    bench.create(numbers(2, 4), pinned=True)
    bench.release(bench.create(numbers(3, 4)))
    bench.create(numbers(4, 4))
    with pytest.raises(PoolExhausted) as refusal:
        bench.extend(context, numbers(5, 12))
    metadata = refusal.value.metadata
    names = ("need", "free", "reclaimable", "total")
    assert [int(metadata[name]) for name in names] == [3, 0, 2, 6]
    assert refusal.value.retry_after == 1.0
    bench.end()


def test_cache_goes_before_idle_contexts() -> None:
    """Catches KV taken from a living context while unheld cache is there."""
    bench = Bench(num_blocks=4, block_size=4)
    idle = bench.create(numbers(1, 8))
    bench.release(bench.create(numbers(2, 8)))
    bench.create(numbers(3, 8))
    assert bench.view(idle).num_computed == 8
    assert bench.pool_view.cached == 0


def test_idle_contexts_give_way_least_recently_used_first() -> None:
    """Catches the context that was used last pushed out first."""
    bench = Bench(num_blocks=6, block_size=4)
    first, second, third = (bench.create(numbers(n, 8)) for n in range(3))
    bench.usage(first, 1)
    bench.create(numbers(9, 4))
    assert bench.view(second).num_computed < 8
    assert bench.view(first).num_computed == bench.view(third).num_computed == 8
    bench.end()


def test_waiting_contexts_give_way_after_idle_ones() -> None:
    """Catches KV taken from who is about to use it."""
    bench = Bench(num_blocks=6, block_size=4, max_running=1)
    soon, idle = bench.create(numbers(1, 8)), bench.create(numbers(2, 8))
    create = bench.engine.contexts.create(TENANT, numbers(3, 12))
    stream = bench.start(soon, 2)
    bench.step()
    assert create.is_done
    assert bench.view(soon).num_computed == 8
    assert bench.view(idle).num_computed < 8
    bench.finish(stream)
    bench.end()


def test_promised_blocks_are_not_given_twice() -> None:
    """Catches two prompts admitted on the same free blocks, of which one is preempted at once."""
    bench = Bench(num_blocks=8, block_size=4, chunk=4)
    first = bench.engine.contexts.create(TENANT, numbers(1, 20))
    second = bench.engine.contexts.create(TENANT, numbers(2, 20))
    bench.step()
    assert bench.engine.view().num_running == 1
    bench.drain()
    assert first.is_done and second.is_done
    assert bench.engine.view().num_preemptions == 0
    bench.end()


def test_watermark_does_not_end_a_running_request() -> None:
    """Catches a request refused at the watermark while a younger one could give way."""
    bench = Bench(num_blocks=9, block_size=4, watermark=3)
    prompts = numbers(1, 16), numbers(2, 1)
    contexts = [bench.create(prompt) for prompt in prompts]
    streams = [bench.start(contexts[0], 17), bench.start(contexts[1], 20)]
    bench.drain()
    assert [stream.error for stream in streams] == [None, None]
    for context, prompt, count in zip(contexts, prompts, (17, 20), strict=True):
        assert bench.tokens(context) == prompt + continuation(prompt, count)
    bench.end()
