"""Case of kind N: log-probabilities of a prompt whose prefix is cached. Blocks have 16 tokens."""

from functools import cache

import pytest
from slow_twin import TENANT, PlainModel, TwinBench
from tiny_engines import TinyEngine
from tiny_models import VOCAB_SIZE, build_tiny_model

PROMPT = [(7 * position + 3 * position * position + 1) % VOCAB_SIZE for position in range(53)]


@cache
def plain() -> PlainModel:
    return PlainModel.of("llama")


def new_bench() -> TwinBench:
    """A bench whose cache holds the first 48 tokens of the prompt."""
    made = TinyEngine(build_tiny_model("llama"), num_blocks=64, block_size=16)
    bench = TwinBench(plain(), made)
    bench.create(PROMPT[:48])
    bench.run()
    (context_id,) = bench.tokens
    bench.release(context_id)
    return bench


def test_case_098_logprobs_of_a_prompt_with_a_cached_prefix() -> None:
    """Catches values for the uncached end alone, and a cache that is written or lost for them."""
    bench = new_bench()
    other = bench.create([*PROMPT[:48], 9])
    bench.run()
    assert other.answer.usage.cached_tokens == 48
    shared = bench.made.blocks(TENANT, other.answer.context.id)[:3]
    content = bench.made.content(shared)

    operation = bench.create(PROMPT, logprobs=True)
    bench.run()  # compares every value with the cold run
    answer = operation.answer
    assert len(answer.logprobs) == 52
    assert answer.usage.computed_tokens == 53, "what has no logits is run again"
    assert bench.made.blocks(TENANT, answer.context.id)[:3] == shared
    assert bench.made.content(shared).equal(content)

    again = bench.create([*PROMPT[:48], 11])
    bench.run()
    assert (again.answer.usage.cached_tokens, again.answer.usage.computed_tokens) == (48, 1)
    bench.close()


@pytest.mark.parametrize("length", [1, 16, 17])
def test_case_098_logprobs_of_a_prompt_at_the_edges(length: int) -> None:
    """Catches an off-by-one where nothing precedes a token, or the prefix is the whole prompt."""
    bench = new_bench()
    operation = bench.create(PROMPT[:length], logprobs=True)
    bench.run()
    assert len(operation.answer.logprobs) == length - 1
    bench.close()


def test_case_098_logprobs_of_a_child_of_an_extend_and_by_score() -> None:
    """Catches another value for the same token on another way to it."""
    bench = new_bench()
    created = bench.create(PROMPT[:48])
    bench.run()
    root = created.answer.context.id
    (child,) = bench.fork(root, at=1)
    by_child = bench.extend(child, PROMPT[1:], logprobs=True)
    by_score = bench.score(root, [PROMPT[48:]])
    by_extend = bench.extend(root, PROMPT[48:], logprobs=True)
    bench.run()
    assert len(by_child.answer.logprobs) == 52
    assert len(by_extend.answer.logprobs) == 5
    assert len(by_score.answer.scores[0].logprobs) == 5
    assert by_extend.answer.logprobs == pytest.approx(by_child.answer.logprobs[-5:], abs=1e-4)
    assert by_score.answer.scores[0].logprobs == pytest.approx(by_extend.answer.logprobs, abs=1e-4)
    bench.close()
