"""Cases of kind D: block boundaries and prompts that are cached as a whole."""

import pytest
from bench import Bench, finish_of, numbers, tokens_of
from fakes import continuation

from agentkv.core.request import FinishReason
from agentkv.errors import PoolExhausted, Reason

TENANT = "tenant"


@pytest.mark.parametrize(("length", "cached"), [(16, 15), (32, 31), (33, 32)])
@pytest.mark.parametrize("max_tokens", [1, 5])
def test_case_030_whole_prompt_cached(length: int, cached: int, max_tokens: int) -> None:
    """Catches a step with nothing to run, and a shared block written to get logits."""
    bench = Bench()
    prompt = numbers(1, length)
    for turn in range(3):
        before = bench.runner.slots.copy()
        answer = bench.created(prompt)
        if turn:
            assert (answer.usage.cached_tokens, answer.usage.computed_tokens) == (cached, 1)
            first_block = bench.blocks(answer.context.id)[: length // 16]
            for block_id in first_block:
                assert before[block_id * 16 : block_id * 16 + 16] == list(
                    bench.runner.block(block_id)
                )
        assert bench.generate(answer.context.id, max_tokens) == continuation(prompt, max_tokens)
        bench.release(answer.context.id)
    bench.end()


def test_case_030_whole_prompt_cached_with_its_logits() -> None:
    """Catches logits that are there and not used: a twin of a living context computes nothing."""
    bench = Bench()
    prompt = numbers(1, 32)
    bench.create(prompt)
    answer = bench.created(prompt)
    assert (answer.usage.cached_tokens, answer.usage.computed_tokens) == (32, 0)
    assert bench.usage(answer.context.id, 1).computed_tokens == 0
    bench.end()


def test_case_030_two_equal_prompts_in_one_cold_batch() -> None:
    """Catches a match of blocks that the same step is only going to write."""
    bench = Bench()
    prompt = numbers(2, 32)
    operations = [bench.engine.contexts.create(TENANT, prompt) for _ in range(2)]
    bench.step()
    for operation in operations:
        assert operation.answer.usage.computed_tokens == 32
        context = operation.answer.context.id
        assert bench.generate(context, 3) == continuation(prompt, 3)
    bench.end()


def test_case_032_other_tier_covers_every_token() -> None:
    """Catches a resume with nothing to run, or with more than the one token that gives logits.

    Without a host tier: a context whose KV is all there, and whose logits are not, computes
    exactly one token; with them, none. One whose KV was dropped is computed again as a whole,
    but for what another context still holds.
    """
    bench = Bench(num_blocks=4)
    prompt = numbers(3, 48)
    context = bench.create(prompt)
    assert bench.usage(context, 1).computed_tokens == 0
    bench.truncate(context, 48)
    assert bench.usage(context, 1).computed_tokens == 1
    bench.release(context)

    parked = bench.create(prompt[:32])
    bench.forget_logits(parked)
    updates = bench.finish(bench.start(parked, 1))
    assert finish_of(updates).usage.computed_tokens == 1
    assert tokens_of(updates) == continuation(prompt[:32], 1)

    bench.truncate(parked, 32)
    (holder,) = bench.fork(parked, at=16)
    bench.release(bench.create(numbers(4, 64)))  # takes all that can give way
    assert bench.view(parked).num_computed < 32
    usage = bench.usage(parked, 1)
    assert usage.computed_tokens + usage.cached_tokens == 32
    assert bench.tokens(parked) == prompt[:32] + continuation(prompt[:32], 1)
    assert bench.tokens(holder) == prompt[:16]
    bench.end()


def test_case_033_input_is_a_multiple_of_the_block() -> None:
    """Catches a lookup that is one block off when the length is a multiple of the block.

    The third time the logits at a whole block's end may be there still: nothing is computed then.
    """
    bench = Bench()
    cached = {15: 0, 16: 15, 17: 16, 31: 16, 32: 31, 33: 32}
    for turn in range(3):
        for length, hit in cached.items():
            prompt = numbers(length, length)
            answer = bench.created(prompt)
            computed = answer.usage.computed_tokens
            assert answer.usage.cached_tokens == length - computed
            assert computed == (length - hit if turn else length) or (turn == 2 and computed == 0)
            assert bench.generate(answer.context.id, 40) == continuation(prompt, 40)
            bench.release(answer.context.id)
    bench.end()


class TestCase035AvailablePagesIgnoreRoomInTheLastPage:
    """B=16, P=4, a pinned context of 49 tokens: 4 blocks, 15 slots left."""

    prompt = numbers(5, 49)

    def full(self) -> tuple[Bench, str]:
        bench = Bench(num_blocks=4)
        context = bench.create(self.prompt, pinned=True)
        assert bench.free == 0
        return bench, context

    @pytest.mark.parametrize("max_tokens", [10, 16])
    def test_case_035_room_in_the_last_page(self, max_tokens: int) -> None:
        """Catches a refusal while the last block has slots; the last token needs none."""
        bench, context = self.full()
        assert bench.generate(context, max_tokens) == continuation(self.prompt, max_tokens)
        assert bench.length(context) == 49 + max_tokens

    def test_case_035_one_token_too_many(self) -> None:
        """Catches tokens lost, or the engine stuck, when generation reaches the wall."""
        bench, context = self.full()
        updates = bench.finish(bench.start(context, 17))
        assert tokens_of(updates) == continuation(self.prompt, 16)
        finish = finish_of(updates)
        assert finish.reason is FinishReason.ERROR
        assert isinstance(finish.error, PoolExhausted)
        assert finish.error.reason is Reason.KV_BLOCKS_EXHAUSTED
        assert bench.length(context) == 65

    def test_case_035_child_samples_from_inherited_logits(self) -> None:
        """Catches a copy made for a token that is never written."""
        bench, context = self.full()
        (child,) = bench.fork(context)
        assert bench.generate(child, 1) == continuation(self.prompt, 1)

    def test_case_035_childs_first_write(self) -> None:
        """Catches a copy forgotten in the count, and a last holder that still copies."""
        bench, context = self.full()
        (child,) = bench.fork(context)
        with pytest.raises(PoolExhausted):
            bench.extend(child, [7])
        assert (bench.length(child), bench.tokens(context)) == (49, self.prompt)
        bench.release(context)
        bench.extend(child, [7])
        assert bench.tokens(child) == [*self.prompt, 7]
        assert bench.num_copies == 0
        bench.end()
