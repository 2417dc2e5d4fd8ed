"""A branch that fills the pool: a copy needs its source beside it, and both do not fit."""

import pytest
from bench import Bench

from agentkv.errors import PoolExhausted

PROMPT = list(range(14))


def test_a_branch_as_large_as_the_pool_computes_what_it_cannot_copy() -> None:
    """Catches a refusal although the idle parent, which alone is in the way, may give way."""
    bench = Bench(num_blocks=4, block_size=4)
    root = bench.create(PROMPT)
    (child,) = bench.fork(root)
    extended = bench.extend(child, [20, 21])
    assert extended.context.length == 16
    assert extended.usage.computed_tokens == 4  # two new, and two of the block it could not copy
    assert bench.view(root).num_computed < len(PROMPT)
    bench.generate(root, 2)  # computes its own again


def test_a_running_branch_starts_over_where_it_cannot_copy() -> None:
    """Catches rows planned from a position that the lost copy would have covered."""
    bench = Bench(num_blocks=4, block_size=4)
    root = bench.create(PROMPT)
    (child,) = bench.fork(root)
    bench.generate(child, 3)  # the first token needs no block, the second one's row does
    assert bench.view(child).length == 17


def test_what_is_pinned_keeps_its_block() -> None:
    """Catches a copy forgone in vain, at the cost of a pinned context's memory."""
    bench = Bench(num_blocks=4, block_size=4)
    root = bench.create(PROMPT, pinned=True)
    (child,) = bench.fork(root)
    with pytest.raises(PoolExhausted):
        bench.extend(child, [20, 21])
    assert bench.view(child).length == len(PROMPT)
    assert bench.view(root).num_computed == len(PROMPT)
