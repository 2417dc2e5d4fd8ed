"""Cancel, release, fork and faults at any moment of a request."""

import logging

import pytest
from bench import TENANT, Bench, finish_of, numbers, tokens_of
from fakes import continuation

from agentkv.core.batch import Batch
from agentkv.core.request import FinishReason
from agentkv.engine.outputs import Finish
from agentkv.errors import InternalError, NotFound, Reason
from agentkv.sampling_params import SamplingParams


def test_fork_during_generate_is_at_the_last_committed_token() -> None:
    """Catches a child that sees a token in flight, or waits for the parent."""
    bench = Bench()
    prompt = numbers(1, 20)
    context = bench.create(prompt)
    stream = bench.start(context, 9)
    bench.steps(4)
    (child,) = bench.fork(context)
    assert bench.tokens(child) == prompt + continuation(prompt, 4)
    bench.finish(stream, bench.start(child, 5))
    assert bench.tokens(child) == bench.tokens(context) == prompt + continuation(prompt, 9)
    bench.end()


def test_fork_during_extend_has_none_of_the_new_tokens() -> None:
    """Catches a child of a context half-way through a commit that is all or none."""
    bench = Bench(chunk=4)
    prompt, new = numbers(1, 20), numbers(2, 12)
    context = bench.create(prompt)
    operation = bench.engine.contexts.extend(TENANT, context, new)
    bench.step()
    (child,) = bench.fork(context)
    assert bench.tokens(child) == bench.tokens(context) == prompt
    bench.run(operation)
    assert bench.tokens(context) == prompt + new
    assert bench.generate(child, 4) == continuation(prompt, 4)
    bench.end()


def test_release_ends_what_runs_on_the_context() -> None:
    """Catches a stream left open, or told that all is well, when its context is gone."""
    bench = Bench(chunk=4)
    contexts = [bench.create(numbers(n, 20)) for n in range(2)]
    stream = bench.start(contexts[0], 9)
    extend = bench.engine.contexts.extend(TENANT, contexts[1], numbers(5, 30))
    bench.steps(2)
    _, ended = bench.engine.contexts.release(TENANT, contexts)
    bench.audit()
    assert set(ended) == {stream, extend}
    finish = finish_of(stream.take_news())
    assert finish.reason is FinishReason.ERROR and finish.context is None
    for error in (finish.error, stream.error, extend.error):
        assert isinstance(error, NotFound)
        assert error.reason is Reason.CONTEXT_RELEASED
    assert bench.live == 0 and not bench.engine.has_work
    bench.end()


def test_release_of_one_branch_leaves_the_others() -> None:
    """Catches a group that ends with its first released branch."""
    bench = Bench()
    prompt = numbers(1, 20)
    group = bench.engine.inference.generate_branches(
        TENANT, bench.create(prompt), 3, SamplingParams(max_tokens=6)
    )
    ids = [request.context.id for request in group.requests]
    bench.steps(2)
    bench.release(ids[1])
    assert not group.is_done and group.error is None
    updates = bench.finish(group)
    assert [finish_of(updates, n).reason for n in range(3)] == [
        FinishReason.LENGTH,
        FinishReason.ERROR,
        FinishReason.LENGTH,
    ]
    assert bench.tokens(ids[2]) == prompt + continuation(prompt, 6)
    bench.end()


@pytest.mark.parametrize("num_steps", [0, 1, 3])
def test_cancelled_generate_keeps_what_it_committed(num_steps: int) -> None:
    """Catches committed tokens lost, or a context left busy."""
    bench = Bench()
    prompt = numbers(1, 20)
    context = bench.create(prompt)
    stream = bench.start(context, 9)
    bench.steps(num_steps)
    bench.engine.cancel(stream)
    bench.audit()
    assert stream.is_done
    assert bench.tokens(context) == prompt + continuation(prompt, num_steps)
    assert not bench.view(context).is_busy
    bench.engine.cancel(stream)
    assert bench.generate(context, 2) == continuation(bench.tokens(context)[:-2], 2)
    bench.end()


@pytest.mark.parametrize("num_steps", [0, 1, 2])
def test_cancelled_extend_commits_nothing(num_steps: int) -> None:
    """Catches half an extend: all of its tokens, or none."""
    bench = Bench(chunk=4)
    prompt = numbers(1, 20)
    context = bench.create(prompt)
    operation = bench.engine.contexts.extend(TENANT, context, numbers(2, 12))
    bench.steps(num_steps)
    bench.engine.cancel(operation)
    bench.audit()
    assert bench.tokens(context) == prompt
    assert len(bench.blocks(context)) == 2
    assert bench.generate(context, 3) == continuation(prompt, 3)
    bench.end()


@pytest.mark.parametrize("num_steps", [0, 1, 2])
def test_cancelled_create_leaves_no_context(num_steps: int) -> None:
    """Catches a context without a handle that stays behind."""
    bench = Bench(chunk=4)
    operation = bench.engine.contexts.create(TENANT, numbers(2, 12))
    bench.steps(num_steps)
    bench.engine.cancel(operation)
    bench.audit()
    assert bench.engine.view().num_contexts == 0
    bench.end()


@pytest.mark.parametrize("moment", ["before", "half-way"])
def test_failing_step_ends_only_its_requests(moment: str, caplog: pytest.LogCaptureFixture) -> None:
    """Catches a fault that spreads: to waiting requests, to other contexts, to the pool."""
    bench = Bench(budget=4, max_running=3)
    prompt = numbers(1, 20)
    parent = bench.create(prompt)
    children = bench.fork(parent, 4)
    streams = [bench.start(child, 6) for child in children]
    bench.steps(2)

    def fail(_: Batch) -> None:
        raise RuntimeError("the device failed")

    bench.runner.before_step = fail if moment == "before" else lambda batch: None
    bench.runner.after_writes = fail if moment == "half-way" else lambda batch: None
    with caplog.at_level(logging.CRITICAL):
        bench.step()
    bench.runner.before_step = bench.runner.after_writes = lambda batch: None
    failed = [stream for stream in streams if stream.is_done]
    assert len(failed) == 3
    for stream in failed:
        assert isinstance(stream.error, InternalError)
        assert stream.error.reason is Reason.ENGINE_STEP_FAILED
        assert finish_of(stream.take_news()).reason is FinishReason.ERROR
    updates = bench.finish(*streams)
    assert sum(isinstance(update, Finish) for update in updates) == 1
    assert bench.tokens(children[3]) == prompt + continuation(prompt, 6)
    for child in children[:3]:
        assert bench.tokens(child) == prompt + continuation(prompt, 2)
        assert bench.generate(child, 4) == continuation(bench.tokens(child)[:-4], 4)
    assert bench.tokens(parent) == prompt
    bench.end()


def test_failing_step_of_a_copy() -> None:
    """Catches a torn copy that is taken for good."""
    bench = Bench()
    prompt = numbers(1, 20)
    parent = bench.create(prompt)
    (child,) = bench.fork(parent)
    content = bench.content(parent)

    def fail(batch: Batch) -> None:
        for copy in batch.copies:
            bench.runner.poison([copy.dst_block_id])
        raise RuntimeError("the device failed")

    bench.runner.after_writes = fail
    operation = bench.engine.contexts.extend(TENANT, child, [7])
    bench.step()
    bench.runner.after_writes = lambda batch: None
    assert operation.error is not None
    assert bench.num_copies == 1
    assert bench.tokens(child) == prompt
    assert bench.content(parent) == content
    bench.extend(child, [7])
    assert bench.generate(child, 3) == continuation([*prompt, 7], 3)
    bench.end()


def test_row_that_is_not_finite_fails_alone() -> None:
    """Catches NaN logits that end the whole batch, or commit a token."""
    bench = Bench()
    contexts = [bench.create(numbers(n, 20)) for n in range(3)]
    streams = [bench.start(context, 6) for context in contexts]
    bench.runner.non_finite = lambda sample: sample.row == 1 and sample.position == 22
    bench.drain()
    all_updates = [stream.take_news() for stream in streams]
    finish = finish_of(all_updates[1])
    assert finish.reason is FinishReason.ERROR
    assert finish.error is not None and finish.error.reason is Reason.ENGINE_STEP_FAILED
    assert bench.tokens(contexts[1]) == numbers(1, 20) + continuation(numbers(1, 20), 2)
    for number in (0, 2):
        updates = all_updates[number]
        assert tokens_of(updates) == continuation(numbers(number, 20), 6)
    bench.end()
