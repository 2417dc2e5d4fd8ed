"""Create and Fork repeated with a request id: one execution, one answer, unless it failed."""

import pytest
from bench import TENANT, Bench

from agentkv.core.batch import Batch
from agentkv.errors import InternalError, InvalidRequest, NotFound, Reason


def test_a_repeat_gets_the_earlier_answer() -> None:
    """Catches a second context for a client that lost the first answer."""
    bench = Bench()
    first = bench.engine.contexts.create(TENANT, range(5), request_id="r")
    assert bench.engine.contexts.create(TENANT, range(5), request_id="r") is first
    answer = bench.run(first).answer
    assert (
        bench.run(bench.engine.contexts.create(TENANT, range(5), request_id="r")).answer is answer
    )
    root = answer.context.id
    views = bench.engine.contexts.fork(TENANT, root, count=2, request_id="r")
    assert bench.engine.contexts.fork(TENANT, root, count=2, request_id="r") == views
    assert bench.engine.view().num_contexts == 3


@pytest.mark.parametrize("tenant", [TENANT, "other"])
def test_an_id_belongs_to_one_tenant_and_one_body(tenant: str) -> None:
    """Catches an answer to another question, or another tenant's."""
    bench = Bench()
    bench.run(bench.engine.contexts.create(TENANT, range(5), request_id="r"))
    if tenant == TENANT:
        with pytest.raises(InvalidRequest) as caught:
            bench.engine.contexts.create(tenant, range(6), request_id="r")
        assert caught.value.reason is Reason.REQUEST_ID_REUSED
    else:
        bench.run(bench.engine.contexts.create(tenant, range(5), request_id="r"))
        assert bench.engine.view().num_contexts == 2


def fails(batch: Batch) -> None:
    raise RuntimeError("out of order")


@pytest.mark.parametrize("how", ["cancelled", "failed"])
def test_a_repeat_of_a_call_that_failed_runs_again(how: str) -> None:
    """Catches a handle of a context that is gone, or yesterday's failure for ten minutes."""
    bench = Bench()
    first = bench.engine.contexts.create(TENANT, range(5), request_id="r")
    if how == "cancelled":
        bench.engine.cancel(first)
    else:
        bench.runner.before_step = fails
        with pytest.raises(InternalError):
            bench.run(first)
        bench.runner.before_step = lambda batch: None
    second = bench.run(
        bench.engine.contexts.create(TENANT, range(5), request_id="r")
    ).answer.context
    assert bench.engine.observer.get(TENANT, second.id).length == 5
    assert bench.engine.view().num_contexts == 1
    with pytest.raises(NotFound):
        bench.engine.observer.get(TENANT, "c0")
