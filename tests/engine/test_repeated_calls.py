"""Create and Fork with a request id: one execution, one answer, and no answer that never was."""

import pytest
from bench import TENANT, Bench

from agentkv.errors import InvalidRequest, Reason

PROMPT = [1, 2, 3]


def test_a_repeat_is_one_execution() -> None:
    """Catches a retried Create that makes a second context."""
    bench = Bench()
    first = bench.engine.create(TENANT, PROMPT, request_id="a")
    again = bench.engine.create(TENANT, PROMPT, request_id="a")
    assert bench.run(first).answer.context.id == bench.run(again).answer.context.id
    assert bench.engine.view().num_contexts == 1


def test_a_call_that_was_cancelled_runs_again() -> None:
    """Catches a retry answered with the context that its first attempt never finished."""
    bench = Bench()
    first = bench.engine.create(TENANT, PROMPT, request_id="a")
    bench.engine.cancel(first)
    assert first.has_failed
    again = bench.run(bench.engine.create(TENANT, PROMPT, request_id="a")).answer
    assert bench.engine.get(TENANT, again.context.id).length == len(PROMPT)
    assert bench.engine.view().num_contexts == 1


def test_an_id_names_one_body() -> None:
    """Catches a reused id that returns somebody else's context."""
    bench = Bench()
    root = bench.create(PROMPT)
    first = bench.engine.fork(TENANT, root, count=2, request_id="b")
    assert bench.engine.fork(TENANT, root, count=2, request_id="b") == first
    with pytest.raises(InvalidRequest) as refused:
        bench.engine.fork(TENANT, root, count=3, request_id="b")
    assert refused.value.reason is Reason.REQUEST_ID_REUSED
    assert bench.engine.view().num_contexts == 3
