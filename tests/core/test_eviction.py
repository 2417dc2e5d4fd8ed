"""KV that leaves the device: where it goes, what stays shared, and what comes back."""

import pytest
from bench import PARK, TENANT, Bench, numbers
from fakes import continuation

from agentkv.core.block_move import MoveCosts, Tier
from agentkv.core.views import Residency


def test_a_parked_context_comes_back_without_computing() -> None:
    """Catches a resume that computes what was moved, or forgets how many tokens it reused."""
    bench = Bench(num_blocks=16, block_size=4, host_blocks=16)
    prompt = numbers(1, 13)
    context = bench.create(prompt)
    view = bench.park(context)
    assert (view.num_computed, view.host_blocks, view.residency) == (0, 4, Residency.HOST)
    assert bench.free == 16 and bench.pool_view.host.live == 4
    usage = bench.extend(context, [1, 2]).usage
    assert (usage.computed_tokens, usage.cached_tokens) == (2, 13)
    assert bench.pool_view.host.free == 16
    assert bench.generate(context, 3) == continuation([*prompt, 1, 2], 3)
    bench.end()


@pytest.mark.parametrize("at", [None, 12, 10, 3])
def test_a_fork_of_a_parked_context_is_free(at: int | None) -> None:
    """Catches a fork that moves or takes a block, and a cut inside a block that loses KV."""
    bench = Bench(num_blocks=16, block_size=4, host_blocks=16)
    prompt = numbers(1, 14)
    context = bench.create(prompt)
    bench.park(context)
    before, num_moves = bench.pool_view, len(bench.runner.moves)
    (child,) = bench.fork(context, at=at)
    assert bench.pool_view == before and len(bench.runner.moves) == num_moves
    tokens = prompt[:at]
    for name, path in ((child, tokens), (context, prompt)):
        usage = bench.extend(name, [5, 6]).usage
        assert usage.computed_tokens == 2, "what was moved was computed again"
        assert bench.generate(name, 2) == continuation([*path, 5, 6], 2)
    bench.end()


def test_a_shared_prefix_moves_once() -> None:
    """Catches a copy on the host for each branch, and a branch that resumes without the prefix."""
    bench = Bench(num_blocks=40, block_size=4, host_blocks=40)
    prefix = numbers(1, 18)
    parent = bench.create(prefix)
    children = bench.fork(parent, 3)
    for number, child in enumerate(children):
        bench.extend(child, numbers(10 + number, 6))
    for context in (parent, *children):
        bench.engine.contexts.update_lease(TENANT, context, PARK)
    bench.step()
    assert bench.live == bench.pool_view.cached == 0
    # 5 blocks of the prefix, and 2 of each branch: one begins with a copy of the prefix's end.
    assert bench.pool_view.host.live == 5 + 3 * 2
    for number, child in enumerate(children):
        assert bench.usage(child, 1).computed_tokens <= 1, "what was moved was computed again"
        path = prefix + numbers(10 + number, 6)
        assert bench.tokens(child) == path + continuation(path, 1)
    bench.end()


def test_what_others_keep_stays_on_the_device() -> None:
    """Catches a park that takes KV from a sibling that runs or is not parked."""
    bench = Bench(num_blocks=16, block_size=4, host_blocks=16)
    prefix = numbers(1, 8)
    parent = bench.create(prefix)
    (child,) = bench.fork(parent)
    bench.extend(child, numbers(2, 8))
    view = bench.park(child)
    assert (view.num_computed, view.host_blocks) == (8, 2)
    assert bench.view(parent).num_computed == 8
    bench.end()


def test_a_context_parked_while_it_runs_leaves_when_its_request_ends() -> None:
    """Catches KV moved from under a request, and a park that is forgotten."""
    bench = Bench(num_blocks=16, block_size=4, host_blocks=16)
    prompt = numbers(1, 8)
    context = bench.create(prompt)
    stream = bench.start(context, 6)
    bench.steps(2)
    bench.engine.contexts.update_lease(TENANT, context, PARK)
    bench.step()
    assert not stream.is_done and not bench.runner.moves
    bench.finish(stream)
    bench.drain()
    assert bench.view(context).residency is Residency.HOST
    assert bench.tokens(context) == prompt + continuation(prompt, 6)
    bench.end()


def test_without_a_host_tier_parked_kv_gives_way_first() -> None:
    """Catches a park that loses KV at once although nobody needs the room."""
    bench = Bench(num_blocks=6, block_size=4)
    first, second = bench.create(numbers(1, 8)), bench.create(numbers(2, 8))
    bench.engine.contexts.update_lease(TENANT, second, PARK)
    bench.step()
    assert bench.view(second).num_computed == 8
    bench.create(numbers(3, 16))
    assert bench.view(first).num_computed == 8
    assert bench.view(second).num_computed == 0
    bench.end()


def test_kv_that_is_cheaper_to_compute_is_not_moved() -> None:
    """Catches moves that cost more than they save."""
    bench = Bench(num_blocks=6, block_size=4, host_blocks=16)
    context = bench.create(numbers(1, 8))
    bench.tree.lower.costs = MoveCosts(recompute_token=1e-4, move_block=1e-3)
    assert bench.park(context).host_blocks == 0
    bench.create(numbers(2, 20))
    assert bench.view(context).num_computed < 8 and not bench.runner.moves
    bench.end()


def test_prefix_cache_goes_to_the_host_and_is_found_there() -> None:
    """Catches a prompt computed again although its KV is in a lower tier."""
    bench = Bench(num_blocks=8, block_size=4, host_blocks=16)
    prompt = numbers(1, 16)
    bench.release(bench.create(prompt))
    bench.release(bench.create(numbers(2, 28)))
    assert bench.pool_view.host.cached > 0
    usage = bench.created([*prompt, 7]).usage
    assert (usage.cached_tokens, usage.computed_tokens) == (16, 1)
    bench.end()


def test_a_full_host_falls_to_disk_least_recently_used_first() -> None:
    """Catches a host that keeps what is old and turns away what is new."""
    bench = Bench(num_blocks=8, block_size=4, host_blocks=4, disk_blocks=4)
    contexts = [bench.create(numbers(n, 15)) for n in range(3)]
    for context in contexts:
        bench.park(context)
    first, second, third = (bench.view(context) for context in contexts)
    assert (third.host_blocks, third.residency) == (4, Residency.HOST)
    assert (second.disk_blocks, second.residency) == (4, Residency.DISK)
    assert (first.residency, first.length) == (Residency.NONE, 15)
    for number, context in enumerate(contexts):
        path = numbers(number, 15)
        assert bench.generate(context, 2) == continuation(path, 2)
    bench.end()


def test_lost_kv_is_recomputed_and_nothing_else() -> None:
    """Catches a failed move that ends a request, or is read nevertheless."""
    bench = Bench(num_blocks=16, block_size=4, host_blocks=16)
    prompt = numbers(1, 16)
    context = bench.create(prompt)
    bench.park(context)
    bench.forget_logits(context)
    lost = [0]

    def loses_third(_: object) -> bool:
        lost[0] += 1
        return lost[0] == 3

    bench.runner.loses = loses_third
    usage = bench.usage(context, 1)
    assert bench.tokens(context) == prompt + continuation(prompt, 1)
    assert (usage.computed_tokens, usage.cached_tokens) == (8, 8)
    assert bench.engine.view().num_lost == 1
    bench.end()


def test_a_flush_empties_the_cache_of_every_tier() -> None:
    """Catches cache that stays on the host for ever, and a flush that takes parked KV."""
    bench = Bench(num_blocks=8, block_size=4, host_blocks=16)
    parked = bench.create(numbers(1, 8))
    bench.park(parked)
    bench.release(bench.create(numbers(2, 28)))
    bench.create(numbers(3, 28))
    assert bench.pool_view.host.cached > 0
    bench.engine.flush_cache()
    bench.audit()
    view = bench.tree.lower.view(Tier.HOST)
    assert (view.cached, view.live) == (0, 2)
    bench.end()
