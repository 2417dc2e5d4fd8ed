"""Cases of kind J: truncation is exact. Cases 76 and 77 need a model with windows."""

import pytest
from bench import Bench, finish_of, numbers, tokens_of
from fakes import continuation

from agentkv.core.request import FinishReason
from agentkv.errors import InvalidRequest, Reason


def test_case_072_trim_amount() -> None:
    """Catches a cut that depends on anything but the length asked for."""
    bench = Bench()
    tokens = numbers(1, 300)
    context = bench.create(tokens)
    for cut in (280, 257, 256, 255, 16, 1):
        assert bench.truncate(context, cut).length == cut
        del tokens[cut:]
        new = numbers(cut + 1, 5)
        num_batches = len(bench.runner.batches)
        bench.extend(context, new)
        positions = bench.runner.batches[num_batches].positions
        assert positions[-5:] == tuple(range(cut, cut + 5))
        tokens += new
        generated = bench.generate(context, 3)
        assert generated == continuation(tokens, 3)
        tokens += generated
        assert bench.tokens(context) == tokens
        bench.engine.flush_cache()
        assert bench.live == -(-bench.view(context).num_computed // 16)
    bench.end()


@pytest.mark.parametrize(("cut", "num_copies", "num_shared"), [(20, 1, 1), (16, 0, 1), (0, 0, 0)])
def test_case_073_truncating_below_the_fork_point(
    cut: int, num_copies: int, num_shared: int
) -> None:
    """Catches a truncate that is clamped at the fork, or reaches into the parent."""
    bench = Bench()
    prompt, new = numbers(2, 40), numbers(3, 5)
    p = bench.create(prompt)
    (c,) = bench.fork(p)
    content = bench.content(p)
    assert bench.truncate(c, cut).length == cut
    assert (bench.tokens(p), bench.content(p)) == (prompt, content)

    bench.extend(c, new)
    p_blocks = bench.blocks(p)
    bench.extend(p, [7])
    assert bench.generate(c, 3) == continuation(prompt[:cut] + new, 3)

    assert bench.blocks(p) == p_blocks, "the parent writes its last block in place"
    assert len(set(p_blocks) & set(bench.blocks(c))) == num_shared
    assert bench.num_copies == num_copies
    assert [copy.num_tokens for batch in bench.runner.batches for copy in batch.copies] == (
        [4] * num_copies
    )
    assert bench.live == 4
    assert bench.generate(p, 3) == continuation([*prompt, 7], 3)
    bench.end()


def test_case_075_no_shift_at_the_limit() -> None:
    """Catches old tokens dropped in silence to make room; refusing the option is the wire's."""
    bench = Bench(max_length=64)
    prompt = numbers(4, 60)
    context = bench.create(prompt)
    updates = bench.finish(bench.start(context, 10))
    assert tokens_of(updates) == continuation(prompt, 4)
    assert finish_of(updates).reason is FinishReason.LENGTH
    with pytest.raises(InvalidRequest) as refusal:
        bench.extend(context, [1])
    assert refusal.value.reason is Reason.CONTEXT_TOO_LONG
    assert bench.tokens(context) == prompt + continuation(prompt, 4)
    bench.end()
