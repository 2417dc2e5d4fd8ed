"""Cases of kind E that need no wire: groups are whole, and a stop never harms the context."""

import pytest
from bench import TENANT, Bench, finish_of, numbers, tokens_of
from fakes import continuation

from agentkv.config import LimitsConfig
from agentkv.core.request import FinishReason
from agentkv.engine.outputs import Branches
from agentkv.errors import InvalidRequest, NotFound, PoolExhausted, Reason
from agentkv.sampling_params import SamplingParams


def test_case_036_aborted_group_leaves_nothing() -> None:
    """Catches a record per group that outlives its branches."""
    bench = Bench()
    prompt = numbers(1, 20)
    parent = bench.create(prompt)
    for _ in range(100):
        group = bench.engine.inference.generate_branches(
            TENANT, parent, 4, SamplingParams(max_tokens=200)
        )
        for _ in range(3):
            bench.engine.step()
        (branches,) = [u for u in group.take_news() if isinstance(u, Branches)]
        bench.engine.cancel(group)
        bench.release(*(view.id for view in branches.contexts))
        bench.engine.flush_cache()
        assert bench.live == 2
        assert not bench.engine.has_work
        assert bench.engine.view().num_contexts == 1
        assert not bench.engine._loop._operations
        assert len(list(bench.tree)) == 1
    assert bench.generate(parent, 4) == continuation(prompt, 4)
    bench.end()


def test_case_037_half_admitted_group() -> None:
    """Catches a fork that makes some of its children before it is refused."""
    bench = Bench(limits=LimitsConfig(max_contexts=8))
    first, second = bench.create(numbers(1, 20)), bench.create(numbers(2, 20))
    children = bench.fork(first, 4)
    with pytest.raises(PoolExhausted) as refusal:
        bench.fork(second, 4)
    assert refusal.value.reason is Reason.TENANT_QUOTA
    assert refusal.value.metadata["quota"] == "contexts"
    assert bench.view(second).num_children == 0
    assert bench.engine.view().num_contexts == 6
    with pytest.raises(PoolExhausted):
        bench.engine.inference.generate_branches(TENANT, second, 4, SamplingParams())
    assert bench.engine.view().num_contexts == 6 and not bench.engine.has_work
    bench.release(*children[:2])
    assert len(bench.fork(second, 4)) == 4
    bench.end()


def test_case_037_retry_with_the_same_request_id() -> None:
    """Catches a retry that makes a second set of children, and counts them."""
    bench = Bench(limits=LimitsConfig(max_contexts=8))
    parent = bench.create(numbers(1, 20))
    views = bench.engine.contexts.fork(TENANT, parent, count=4, request_id="r")
    assert bench.engine.contexts.fork(TENANT, parent, count=4, request_id="r") == views
    assert bench.engine.view().num_contexts == 5
    bench.end()


def test_case_038_first_finished_sample_ends_the_stream() -> None:
    """Catches a stream that ends with its first branch, and one that holds its blocks."""
    bench = Bench(end_token_ids=[999])
    prompt = numbers(3, 31)
    parent = bench.create(prompt)
    group = bench.engine.inference.generate_branches(
        TENANT, parent, 3, SamplingParams(max_tokens=20)
    )
    ordinals = [request.stream.ordinal for request in group.requests]
    bench.runner.forced = {ordinals[0]: [5, 999], ordinals[1]: [6] * 20, ordinals[2]: [7] * 20}
    news = list(group.take_news())
    bench.steps(3)
    news += group.take_news()
    first = finish_of(news, 0)
    assert first.reason is FinishReason.STOP
    assert tokens_of(news, 0) == [5, 999]
    assert first.context is not None
    live = bench.live
    assert bench.release(first.context.id).blocks_freed == 1
    assert bench.live == live - 1
    news += bench.finish(group)
    for branch in (1, 2):
        assert finish_of(news, branch).reason is FinishReason.LENGTH
        assert tokens_of(news, branch) == [5 + branch] * 20
    bench.end()


def test_case_040_over_long_turn() -> None:
    """Catches a refused turn that leaves its length, or a cut, in the context."""
    bench = Bench(max_length=128)
    tokens = numbers(4, 100)
    context = bench.create(tokens)
    content = bench.content(context)
    with pytest.raises(InvalidRequest) as refusal:
        bench.extend(context, numbers(5, 60))
    assert refusal.value.reason is Reason.CONTEXT_TOO_LONG
    assert (bench.length(context), bench.content(context)) == (100, content)
    tokens += continuation(tokens, 5)
    assert bench.generate(context, 5) == tokens[100:]
    new = numbers(6, 23)
    assert bench.extend(context, new).context.length == 128
    with pytest.raises(InvalidRequest) as refusal:
        bench.start(context, 1)
    assert refusal.value.reason is Reason.CONTEXT_TOO_LONG
    assert bench.tokens(context) == tokens + new
    bench.end()


def test_case_042_close_during_decode() -> None:
    """Catches blocks freed twice, or while a step still writes them."""
    bench = Bench(num_blocks=4)
    context = bench.create(numbers(7, 32))
    stream = bench.start(context, 200)
    bench.steps(3)
    bench.release(context)
    assert stream.is_done
    error = finish_of(stream.take_news()).error
    assert error is not None and error.reason is Reason.CONTEXT_RELEASED
    prompt = numbers(8, 60)
    newcomer = bench.create(prompt)
    assert bench.generate(newcomer, 4) == continuation(prompt, 4)
    with pytest.raises(NotFound):
        bench.release(context)
    bench.end()


def test_case_042_parent_released_while_its_child_copies() -> None:
    """Catches a source block freed before the copy of it is done."""
    bench = Bench(chunk=4)
    prompt, new = numbers(9, 20), numbers(10, 12)
    parent = bench.create(prompt)
    (child,) = bench.fork(parent)
    operation = bench.engine.contexts.extend(TENANT, child, new)
    bench.step()
    assert bench.num_copies == 1 and not operation.is_done
    bench.release(parent)
    bench.run(operation)
    assert bench.generate(child, 4) == continuation(prompt + new, 4)
    bench.end()
