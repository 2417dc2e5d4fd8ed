"""Bills of contexts, trees and tenants, in numbers one can work out by hand."""

import pytest
from bench import TENANT, Bench, numbers

from agentkv.config import LimitsConfig
from agentkv.core.bill import Bill
from agentkv.core.block_move import Tier
from agentkv.errors import NotFound


def bill_of(bench: Bench, context_id: str) -> Bill:
    """What one context has used."""
    return bench.engine.observer.usage(TENANT, context_id=context_id).bill


def device(bill: Bill) -> float:
    """Block-seconds on the device."""
    return bill.block_seconds[Tier.DEVICE]


def test_a_shared_blocks_second_is_split() -> None:
    """Catches holders that pay in full for what they share, or savings counted wrong."""
    bench = Bench(block_size=4)
    root = bench.create(numbers(1, 16))
    bench.now += 10.0
    assert device(bill_of(bench, root)) == 40.0
    children = bench.fork(root, 3)
    bench.now += 8.0
    assert device(bill_of(bench, root)) == 40.0 + 4 * 8 / 4
    for child in children:
        bill = bill_of(bench, child)
        assert device(bill) == 8.0
        assert bill.saved_block_seconds == 4 * 8 - 8
    bench.extend(children[0], [1])
    bench.now += 4.0
    assert device(bill_of(bench, children[0])) == 8.0 + 4.0 + 4.0
    assert device(bench.engine.observer.usage(TENANT).bill) == 40 + 32 + 16 + 4
    bench.end()


def test_a_cut_block_in_the_host_costs_those_who_still_count_on_it() -> None:
    """Catches a block charged once per part of a cut, or no more when its upper part is back."""
    bench = Bench(block_size=4, host_blocks=8)
    root = bench.create(numbers(1, 10))
    bench.park(root)
    (short,), (middle,) = bench.fork(root, at=6), bench.fork(root, at=7)
    contexts = (root, short, middle)

    def host() -> list[float]:
        return [bill_of(bench, context).block_seconds[Tier.HOST] for context in contexts]

    bench.now += 6.0
    assert host() == [6 + 6 / 3 + 6 / 3, 6 / 3 + 6 / 3, 6 / 3 + 6 / 3]
    bench.extend(short, [1])  # brings back [0, 6) in blocks of its own
    bench.now += 6.0
    assert host() == [10 + 6 + 6 / 2, 4, 4 + 6 / 2]
    tier = bench.engine.observer.usage(TENANT).tiers[Tier.HOST]
    assert (tier.taken, tier.held, tier.unheld) == (30, 30, 0)
    bench.release(root, middle)
    held = bench.engine.observer.usage(TENANT).tiers[Tier.HOST].held
    bench.now += 6.0
    assert bench.engine.observer.usage(TENANT).tiers[Tier.HOST].held == held, "cache is nobody's"
    bench.end()


def test_a_released_context_stays_counted_in_its_tree() -> None:
    """Catches bills that vanish with their context, or end up in another tree."""
    bench = Bench(block_size=4)
    first, second = bench.create(numbers(1, 8)), bench.create(numbers(2, 4))
    (child,) = bench.fork(first)
    bench.now += 6.0
    bench.release(first)
    bench.now += 2.0
    bench.release(child)
    bench.now += 5.0
    assert device(bench.engine.observer.usage(TENANT, root_id=first).bill) == 12.0 + 4.0
    assert device(bench.engine.observer.usage(TENANT, root_id=second).bill) == 13.0
    assert device(bench.engine.observer.usage(TENANT).bill) == 29.0
    assert bench.engine.observer.usage(TENANT, root_id=first).num_contexts == 0
    with pytest.raises(NotFound):
        bench.engine.observer.usage(TENANT, context_id=first)
    for name in ("context_id", "root_id"):
        with pytest.raises(NotFound):
            bench.engine.observer.usage("other", **{name: second})
    bench.end()


def test_ended_trees_are_forgotten_in_the_end() -> None:
    """Catches memory that grows with every tree there ever was."""
    bench = Bench(limits=LimitsConfig(max_ended_trees=2))
    roots = [bench.create(numbers(seed, 4)) for seed in range(4)]
    bench.now += 1.0
    for root in roots:
        bench.release(root)
    with pytest.raises(NotFound):
        bench.engine.observer.usage(TENANT, root_id=roots[1])
    assert device(bench.engine.observer.usage(TENANT, root_id=roots[2]).bill) == 1.0
    assert device(bench.engine.observer.usage(TENANT).bill) == 4.0


def test_tokens_reused_copied_and_computed_again() -> None:
    """Catches reuse of a context's own KV, and recomputation that passes for new work."""
    bench = Bench(block_size=4)
    prompt = numbers(1, 10)
    root = bench.create(prompt)
    assert bill_of(bench, root).reused_tokens == 0
    (child,) = bench.fork(root, at=6)
    bench.generate(child, 3)
    bill = bill_of(bench, child)
    assert (bill.reused_tokens, bill.recomputed_tokens) == (5, 1)
    assert (bill.computed_tokens, bill.generated_tokens, bill.block_copies) == (3, 3, 1)
    bench.extend(child, numbers(2, 4))
    assert bill_of(bench, child).reused_tokens == 5
    again = bench.create([*prompt[:8], 7])
    assert bill_of(bench, again).reused_tokens == 8
    bench.end()


def test_kv_that_gave_way_is_recomputed() -> None:
    """Catches a recomputation after pressure that nobody sees."""
    bench = Bench(num_blocks=4, block_size=4)
    context = bench.create(numbers(1, 12))
    bench.release(bench.create(numbers(2, 16)))
    bench.generate(context, 1)
    bill = bill_of(bench, context)
    assert (bill.computed_tokens, bill.recomputed_tokens) == (24, 12)
    bench.end()


def test_scores_are_charged_to_their_context() -> None:
    """Catches scratch branches that nobody pays for, also when their context is released first."""
    bench = Bench(block_size=4)
    root = bench.create(numbers(1, 8))
    operation = bench.engine.inference.score(TENANT, root, [numbers(2, 6), numbers(3, 6)])
    bench.step()
    bench.now += 3.0
    usage = bench.engine.observer.usage(TENANT, context_id=root)
    assert usage.num_contexts == 1
    assert usage.bill.computed_tokens == 8 + 2 * 5
    bench.release(root)
    bench.drain()
    assert operation.is_done
    bill = bench.engine.observer.usage(TENANT, root_id=root).bill
    assert bill == bench.engine.observer.usage(TENANT).bill
    assert bill.computed_tokens == 18
    bench.end()
