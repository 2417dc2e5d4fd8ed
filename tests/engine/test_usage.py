"""Numbers: what a request computed, found cached and made; what the pool holds."""

from bench import TENANT, Bench, finish_of, numbers
from fakes import logprob

from agentkv.core.views import Residency, Usage
from agentkv.sampling_params import SamplingParams


def test_usage_of_create_and_extend() -> None:
    """Catches rows counted for tokens that were there, or not counted at all."""
    bench = Bench()
    prompt = numbers(1, 40)
    first = bench.created(prompt)
    assert first.usage == Usage(40, 0, 0)
    second = bench.created(prompt[:35] + numbers(2, 10))
    assert second.usage == Usage(13, 32, 0)
    assert bench.extend(first.context.id, [1, 2, 3]).usage == Usage(3, 40, 0)
    assert bench.engine.view().computed_tokens == 40 + 13 + 3


def test_first_token_after_create_computes_nothing() -> None:
    """Catches head logits that are kept and not used: n tokens take n - 1 rows."""
    bench = Bench()
    context = bench.create(numbers(1, 40))
    assert bench.view(context).has_head_logits
    assert bench.usage(context, 5) == Usage(4, 40, 5)
    assert not bench.view(context).has_head_logits
    assert bench.view(context).num_computed == 44
    assert bench.usage(context, 2) == Usage(2, 44, 2)


def test_branches_inherit_logits() -> None:
    """Catches a fork whose children compute the shared head again, each for itself."""
    bench = Bench()
    context = bench.create(numbers(1, 40))
    params = SamplingParams(max_tokens=1)
    updates = bench.finish(bench.engine.inference.generate_branches(TENANT, context, 4, params))
    for branch in range(4):
        assert finish_of(updates, branch).usage == Usage(0, 40, 1)
    assert bench.engine.view().computed_tokens == 40
    assert bench.num_copies == 0


def test_siblings_share_a_row() -> None:
    """Catches one row per sibling for the same token: only one of them computes it."""
    bench = Bench()
    context = bench.create(numbers(1, 40))
    bench.forget_logits(context)
    children = bench.fork(context, 4)
    bench.finish(*[bench.start(child, 1) for child in children])
    assert bench.runner.batches[-1].num_rows == 1
    assert len(bench.runner.batches[-1].samples) == 4
    assert bench.engine.view().computed_tokens == 41
    assert bench.view(context).has_head_logits, "the parent inherits what its children computed"


def test_fork_after_a_sampled_token_computes_one_row() -> None:
    """Catches a branch that computes a whole block again for a token without KV."""
    bench = Bench()
    context = bench.create(numbers(1, 40))
    bench.generate(context, 3)
    children = bench.fork(context, 3)
    updates = [bench.finish(bench.start(child, 1)) for child in children]
    assert [finish_of(u).usage.computed_tokens for u in updates] == [1, 0, 0]


def test_chunked_prompt_is_counted_once() -> None:
    """Catches cached tokens read off a later chunk."""
    bench = Bench(chunk=7)
    answer = bench.created(numbers(1, 40))
    assert answer.usage == Usage(40, 0, 0)


def test_preempted_request_counts_what_it_ran_again() -> None:
    """Catches tokens doubled, or generated ones counted as prompt, by a resume."""
    bench = Bench(num_blocks=8, block_size=4)
    contexts = [bench.create(numbers(n, 3)) for n in range(2)]
    streams = [bench.start(context, 24) for context in contexts]
    updates = bench.finish(*streams)
    usages = [update.usage for update in updates if hasattr(update, "usage")]
    assert bench.engine.view().num_preemptions > 0
    assert [usage.generated_tokens for usage in usages] == [24, 24]
    assert min(usage.computed_tokens for usage in usages) == 23
    assert max(usage.computed_tokens for usage in usages) > 23
    bench.end()


def test_score_leaves_no_trace() -> None:
    """Catches a context, a block or a length changed by looking ahead."""
    bench = Bench()
    prompt = numbers(1, 40)
    context = bench.create(prompt)
    before = bench.view(context), bench.pool_view.live, bench.content(context)
    continuations = [[1, 2, 3], [4], [1, 2, 9], numbers(2, 20)]
    scores = bench.score(context, continuations)
    for scored, tokens in zip(scores.scores, continuations, strict=True):
        path = prompt + tokens
        expected = [logprob(path[: 40 + n], token) for n, token in enumerate(tokens)]
        assert list(scored.logprobs) == expected
        assert scored.total == sum(expected)
    assert (bench.view(context), bench.pool_view.live, bench.content(context)) == before
    assert scores.usage.computed_tokens == sum(len(tokens) - 1 for tokens in continuations)
    assert bench.engine.view().num_contexts == 1
    bench.end()


def test_score_of_a_busy_context() -> None:
    """Catches a score that waits for, or reads, what a running request has not committed."""
    bench = Bench()
    prompt = numbers(1, 20)
    context = bench.create(prompt)
    stream = bench.start(context, 6)
    bench.steps(2)
    base = bench.tokens(context)
    scores = bench.score(context, [[5, 6]])
    assert list(scores.scores[0].logprobs) == [logprob(base, 5), logprob([*base, 5], 6)]
    bench.finish(stream)
    bench.end()


def test_score_cancelled() -> None:
    """Catches hidden branches that outlive their call."""
    bench = Bench(chunk=4)
    context = bench.create(numbers(1, 20))
    operation = bench.engine.inference.score(TENANT, context, [numbers(2, 30), numbers(3, 30)])
    bench.steps(2)
    bench.engine.cancel(operation)
    bench.audit()
    assert bench.live == 2 and not bench.engine.has_work
    assert bench.engine._store.hidden == set()
    bench.end()


def test_extend_reports_logprobs() -> None:
    """Catches values of the wrong token, with and without logits before the first one."""
    bench = Bench(chunk=4)
    prompt, new = numbers(1, 20), numbers(2, 9)
    context = bench.create(prompt)
    path = prompt + new
    expected = [logprob(path[: 20 + n], token) for n, token in enumerate(new)]
    for has_logits in (True, False):
        if not has_logits:
            bench.forget_logits(context)
        operation = bench.run(bench.engine.contexts.extend(TENANT, context, new, logprobs=True))
        assert list(operation.answer.logprobs) == expected
        bench.truncate(context, 20)
    bench.end()


def test_extend_from_nothing_reports_all_but_the_first() -> None:
    """Catches a value for the first token of all, which follows nothing."""
    bench = Bench()
    context = bench.create([1])
    bench.truncate(context, 0)
    operation = bench.run(bench.engine.contexts.extend(TENANT, context, [5, 6, 7], logprobs=True))
    assert list(operation.answer.logprobs) == [logprob([5], 6), logprob([5, 6], 7)]


def test_residency_follows_pressure() -> None:
    """Catches KV said to be there after it gave way."""
    bench = Bench(num_blocks=4)
    context = bench.create(numbers(1, 40))
    assert bench.view(context).residency is Residency.DEVICE
    (other,) = (bench.create(numbers(2, 20)),)
    assert bench.view(context).residency is Residency.PARTIAL
    bench.release(other)
    bench.release(bench.create(numbers(3, 60)))
    assert bench.view(context).residency is Residency.NONE
    assert bench.view(context).length == 40
    bench.usage(context, 1)
    assert bench.view(context).residency is Residency.DEVICE
    bench.end()


def test_waste_is_less_than_a_block_per_segment() -> None:
    """Catches slots that are allocated and never used: only partly filled blocks may waste."""
    bench = Bench(num_blocks=64)
    root = bench.create(numbers(1, 100))
    children = bench.fork(root, 6)
    bench.finish(*[bench.start(child, 3 + 5 * n) for n, child in enumerate(children)])
    view = bench.pool_view
    allocated = (view.live + view.cached) * 16
    assert view.used_slots <= allocated
    assert allocated - view.used_slots < 16 * len(list(bench.tree))
    assert view.waste == 1 - view.used_slots / allocated
    bench.end()
    assert bench.pool_view.waste == 0.0


def test_scoring_one_token_on_kept_logits_computes_nothing() -> None:
    """Catches a row and a block for the last token of a continuation, which nothing follows."""
    bench = Bench(num_blocks=2, block_size=4)
    root = bench.create([1, 2, 3, 4, 5, 6, 7, 8])
    scores = bench.run(bench.engine.inference.score(TENANT, root, [[1], [2], [3]])).answer
    assert scores.usage.computed_tokens == 0
    assert bench.pool.num_free == 0


def test_scoring_many_tokens_runs_all_but_the_last() -> None:
    """Catches a score that is off by a row, or that computes its continuation to the end."""
    bench = Bench(block_size=4)
    root = bench.create([1, 2, 3, 4, 5])
    scores = bench.run(bench.engine.inference.score(TENANT, root, [[1, 2, 3]])).answer
    assert scores.usage.computed_tokens == 2
    assert len(scores.scores[0].logprobs) == 3
