"""Cases of kind A: forks and copy-on-write keep every path what it was.

"Equals the cold run" means: the tokens that the fake model makes of the same tokens from scratch.
Case 2 compares bytes of tensors and stands with the KV cache's tests.
"""

import pytest
from bench import Bench, numbers
from fakes import continuation

from agentkv.errors import PoolExhausted, Reason


@pytest.mark.parametrize("keeps_parents", [True, False])
def test_case_001_fork_test_across_unrelated_parents(keeps_parents: bool) -> None:
    """Catches a copy decided for the wrong pair of a batch, or skipped for the right one."""
    bench = Bench()
    x, y = numbers(1, 20), numbers(2, 23)
    parents = [bench.create(x), bench.create(y)]
    children = [child for parent in parents for child in bench.fork(parent, 2)]
    assert bench.live == 4
    if not keeps_parents:
        bench.release(*parents)

    bench.finish(*[bench.start(child, 8) for child in children])

    assert all(batch.num_rows in (0, 4) for batch in bench.runner.batches[-8:])
    for child, prompt in zip(children, (x, x, y, y), strict=True):
        assert bench.tokens(child) == prompt + continuation(prompt, 8)
    assert bench.live == (8 if keeps_parents else 6)
    x_blocks, y_blocks = (
        {block for child in pair for block in bench.blocks(child)}
        for pair in (children[:2], children[2:])
    )
    assert x_blocks.isdisjoint(y_blocks)
    bench.end()


@pytest.mark.parametrize("length", [16, 31, 32, 33, 48])
@pytest.mark.parametrize("has_logits", [True, False])
def test_case_003_fork_on_a_block_boundary(length: int, has_logits: bool) -> None:
    """Catches a child with nothing to sample from, and a shared block written to recompute."""
    bench = Bench()
    prompt = numbers(3, length)
    parent = bench.create(prompt)
    if not has_logits:
        bench.forget_logits(parent)
    child_1, child_2 = bench.fork(parent, 2)
    content = bench.content(parent)

    first = bench.usage(child_1, 1)
    assert first.computed_tokens == (0 if has_logits else 1)
    assert bench.usage(parent, 1).computed_tokens == 0, "the logits were kept for the siblings"
    (grandchild,) = bench.fork(child_2)
    assert bench.usage(grandchild, 1).computed_tokens == 0

    for context in (child_1, parent, grandchild):
        assert bench.tokens(context) == prompt + continuation(prompt, 1)
    assert bench.content(child_2) == content
    assert bench.num_copies == 0
    bench.end()


def test_case_005_blocks_run_out_around_a_fork_of_pinned_contexts() -> None:
    """Catches a fork that needs blocks, and a failed write that harms more than itself."""
    bench = Bench(num_blocks=10)
    prompt = numbers(4, 100)
    parent = bench.create(prompt, pinned=True)
    children = bench.fork(parent, 5)
    assert (bench.live, bench.free) == (7, 3)

    for child in children[:3]:
        assert bench.extend(child, [7]).context.length == 101
    for child in children[3:]:
        with pytest.raises(PoolExhausted) as refusal:
            bench.extend(child, [7])
        assert refusal.value.reason is Reason.KV_BLOCKS_EXHAUSTED
        assert (refusal.value.metadata["need"], refusal.value.metadata["free"]) == ("1", "0")
        assert bench.length(child) == 100
    assert bench.num_copies == 3
    assert bench.generate(parent, 1) == continuation(prompt, 1)
    bench.end()


def test_case_005_blocks_run_out_around_a_fork_of_idle_contexts() -> None:
    """Catches a refusal while idle siblings could give way."""
    bench = Bench(num_blocks=10)
    prompt = numbers(4, 100)
    parent = bench.create(prompt)
    children = bench.fork(parent, 5)
    assert (bench.live, bench.free) == (7, 3)

    for child in children:
        assert bench.extend(child, [7]).context.length == 101
    for child in children:
        assert bench.generate(child, 2) == continuation([*prompt, 7], 2)
    assert bench.generate(parent, 3) == continuation(prompt, 3)
    bench.end()


def test_case_007_template_mutated_by_use() -> None:
    """Catches a fork's child that appends to what it shares with the template."""
    bench = Bench()
    prompt = numbers(5, 64)
    template = bench.create(prompt)
    content = bench.content(template)
    for turn in range(10):
        (child,) = bench.fork(template)
        bench.extend(child, [turn] * 3)
        assert bench.generate(child, 10) == continuation([*prompt, *[turn] * 3], 10)
        bench.release(child)
        bench.engine.flush_cache()
        assert bench.length(template) == 64
        assert bench.content(template) == content
        assert bench.live == 4

    (child,) = bench.fork(template)
    stream = bench.start(child, 10)
    bench.step()
    (other,) = bench.fork(template)
    bench.finish(stream)
    assert bench.tokens(child) == prompt + continuation(prompt, 10)
    assert bench.tokens(other) == prompt
    assert bench.content(template) == content
    bench.end()
