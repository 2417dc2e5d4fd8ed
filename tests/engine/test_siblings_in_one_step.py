"""Two requests on one path in one step, where the blocks of the first are taken and not filled."""

from bench import TENANT, Bench, numbers, tokens_of
from fakes import continuation, logprob

from agentkv.engine.operations import Scoring


def scored(scoring: Scoring, before: list[int]) -> bool:
    """Whether every log-probability is that of the same tokens run alone."""
    for score in scoring.answer.scores:
        path = list(before)
        for token, value in zip(score.token_ids, score.logprobs, strict=True):
            if value != logprob(path, token):
                return False
            path.append(token)
    return True


def test_a_sibling_that_parts_above_leaves_the_first_ones_blocks_alone() -> None:
    """Catches a cut, made for the second request, that takes the blocks from the first."""
    bench = Bench(num_blocks=14, block_size=4)
    prompt, other_prompt = numbers(1, 10), numbers(2, 24)
    context, other = bench.create(prompt), bench.create(other_prompt)
    bench.engine.contexts.create(
        TENANT, numbers(5, 24)
    )  # takes the context's last block in this step
    generation = bench.start(context, 2)  # takes a block for 8 and 9
    scoring = bench.engine.inference.score(TENANT, context, [numbers(3, 4), numbers(4, 4)])
    bench.start(other, 1)  # or its blocks would go first
    bench.step()
    assert bench.view(context).num_computed == 10
    bench.drain()
    assert tokens_of(generation.take_news()) == continuation(prompt, 2)
    assert scoring.error is None and scored(scoring, prompt)
    bench.end()


def test_blocks_that_another_request_has_taken_for_both_are_not_needed_twice() -> None:
    """Catches a request refused for good although all it needs fits the pool."""
    bench = Bench(num_blocks=16, block_size=4, chunk=7)
    prompt = numbers(1, 52)
    context = bench.create(prompt)
    bench.release(bench.create(numbers(2, 48)))
    assert bench.view(context).num_computed == 16, "most of it was to give way"
    generation = bench.start(context, 1)
    scoring = bench.engine.inference.score(TENANT, context, [numbers(3, 6)])
    bench.drain()
    assert tokens_of(generation.take_news()) == continuation(prompt, 1)
    assert scoring.error is None and scored(scoring, prompt)
    bench.end()
