"""Identity: create, fork, release, and repeats by request id."""

from collections.abc import Callable

import pytest
from bench import PINNED, TENANT, Bench, numbers
from fakes import make_engine

from agentkv.config import LimitsConfig
from agentkv.engine.operations import Operation
from agentkv.errors import (
    AgentKVError,
    ContextBusy,
    ContextMoved,
    InvalidRequest,
    NotFound,
    PoolExhausted,
    Reason,
)
from agentkv.sampling_params import SamplingParams


def test_create_is_idempotent_by_request_id() -> None:
    """Catches a retry that makes a second context, while the first runs or after it."""
    bench = Bench()
    prompt = numbers(1, 20)
    first = bench.engine.contexts.create(TENANT, prompt, labels={"a": "b"}, request_id="r")
    assert bench.engine.contexts.create(TENANT, prompt, labels={"a": "b"}, request_id="r") is first
    bench.run(first)
    assert bench.engine.contexts.create(TENANT, prompt, labels={"a": "b"}, request_id="r") is first
    assert bench.engine.view().num_contexts == 1
    assert first.answer.context.labels == (("a", "b"),)


@pytest.mark.parametrize("end", ["cancel", "failure"])
def test_create_that_came_to_nothing_is_run_again(end: str) -> None:
    """Catches an answer remembered for a call that has none: a handle of a context that is gone."""
    bench = Bench()
    prompt = numbers(1, 20)
    first = bench.engine.contexts.create(TENANT, prompt, request_id="r")
    if end == "cancel":
        bench.engine.cancel(first)
    else:
        fail_next_step(bench)
        bench.step()
        assert first.error is not None
    bench.runner.before_step = lambda batch: None
    second = bench.run(bench.engine.contexts.create(TENANT, prompt, request_id="r"))
    assert second is not first
    assert bench.tokens(second.answer.context.id) == prompt
    assert bench.engine.contexts.create(TENANT, prompt, request_id="r") is second
    bench.end()


@pytest.mark.parametrize(
    "repeat",
    [
        lambda engine: engine.contexts.create(TENANT, numbers(2, 20), request_id="r"),
        lambda engine: engine.contexts.create(TENANT, numbers(1, 20), lease=PINNED, request_id="r"),
        lambda engine: engine.contexts.create(
            TENANT, numbers(1, 20), labels={"x": "y"}, request_id="r"
        ),
    ],
)
def test_request_id_of_another_create(repeat: Callable[[object], Operation]) -> None:
    """Catches another call's answer given to a caller who asks for something else."""
    bench = Bench()
    bench.run(bench.engine.contexts.create(TENANT, numbers(1, 20), request_id="r"))
    with pytest.raises(InvalidRequest) as refusal:
        repeat(bench.engine)
    assert refusal.value.reason is Reason.REQUEST_ID_REUSED
    assert bench.engine.view().num_contexts == 1


def test_request_ids_of_tenants_and_methods_are_apart() -> None:
    """Catches one tenant's answer given to another, and a Create's to a Fork."""
    bench = Bench()
    context = bench.run(bench.engine.contexts.create(TENANT, [1], request_id="r")).answer.context
    other = bench.run(bench.engine.contexts.create("other", [1], request_id="r")).answer.context
    assert context.id != other.id
    (child,) = bench.engine.contexts.fork(TENANT, context.id, request_id="r")
    assert child.parent_id == context.id
    with pytest.raises(InvalidRequest) as refusal:
        bench.engine.contexts.fork(TENANT, context.id, count=2, request_id="r")
    assert refusal.value.reason is Reason.REQUEST_ID_REUSED


def test_reply_expires() -> None:
    """Catches answers remembered for ever: the clock is the caller's."""
    now = [0.0]
    engine = make_engine(clock=lambda: now[0], limits=LimitsConfig(reply_ttl=10))
    first = engine.run(engine.contexts.create(TENANT, [1], request_id="r"))
    now[0] = 9.0
    assert engine.contexts.create(TENANT, [1], request_id="r") is first
    now[0] = 10.0
    assert engine.contexts.create(TENANT, [1], request_id="r") is not first


def test_views_after_a_fork() -> None:
    """Catches lineage, or block counts, that do not follow forks and releases."""
    bench = Bench()
    context = bench.create(numbers(1, 40))
    (child,) = bench.fork(context, at=20)
    (grandchild,) = bench.fork(child)
    view = bench.view(grandchild)
    assert (view.parent_id, view.root_id, view.depth) == (child, context, 2)
    assert (view.length, view.fork_position, view.num_computed) == (20, 20, 20)
    assert (view.private_blocks, view.shared_blocks) == (0, 2)
    assert bench.view(context).num_children == 1
    assert bench.view(context).private_blocks == 1
    bench.release(child)
    assert bench.view(context).num_children == 0
    assert bench.view(grandchild).parent_id == child, "the lineage stays readable"
    released = bench.release(context)
    assert (released.num_released, released.blocks_freed) == (1, 1)
    assert bench.view(grandchild).private_blocks == 2
    bench.end()


def test_recursive_release() -> None:
    """Catches a subtree released in part, or twice."""
    bench = Bench()
    root = bench.create(numbers(1, 40))
    children = bench.fork(root, 2)
    bench.fork(children[0], 2)
    keep = bench.create(numbers(2, 5))
    released = bench.release(root, children[0], recursive=True)
    assert released.num_released == 5
    assert [view.id for view in bench.engine.observer.list(TENANT).contexts] == [keep]
    bench.end()


def test_release_is_all_or_none() -> None:
    """Catches a list released up to its first unknown handle."""
    bench = Bench()
    context = bench.create([1])
    with pytest.raises(NotFound):
        bench.release(context, "gone")
    assert bench.length(context) == 1
    released, _ = bench.engine.contexts.release(
        TENANT, [context, "gone", context], allow_missing=True
    )
    assert released.num_released == 1


def test_foreign_handles_answer_as_unknown_ones() -> None:
    """Catches a handle that tells another tenant anything."""
    bench = Bench()
    context = bench.create(numbers(1, 20))
    params = SamplingParams()
    engine = bench.engine
    calls: list[Callable[[str], object]] = [
        lambda handle: engine.observer.get("other", handle),
        lambda handle: engine.observer.tokens("other", handle),
        lambda handle: engine.contexts.fork("other", handle),
        lambda handle: engine.contexts.extend("other", handle, [1]),
        lambda handle: engine.inference.generate("other", handle, params),
        lambda handle: engine.inference.generate_branches("other", handle, 2, params),
        lambda handle: engine.inference.score("other", handle, [[1]]),
        lambda handle: engine.contexts.truncate("other", handle, 0),
        lambda handle: engine.contexts.release("other", [handle]),
    ]
    for call in calls:
        errors = []
        for handle in (context, "unknown"):
            with pytest.raises(AgentKVError) as refusal:
                call(handle)
            errors.append(refusal.value)
        assert type(errors[0]) is type(errors[1]) is NotFound
        assert [str(e) for e in errors] == [str(errors[1])] * 2
        assert errors[0].metadata == errors[1].metadata
    assert engine.observer.list("other").contexts == ()
    assert bench.length(context) == 20


def test_no_prefix_is_shared_between_tenants() -> None:
    """Catches a cache hit that tells one tenant what another has computed."""
    bench = Bench()
    bench.create(numbers(1, 40))
    answer = bench.engine.run(bench.engine.contexts.create("other", numbers(1, 40))).answer
    assert answer.usage.cached_tokens == 0
    assert bench.live == 6


def test_pages_of_contexts() -> None:
    """Catches a context listed twice or left out at a page's edge."""
    bench = Bench()
    ids = [bench.create([n]) for n in range(7)]
    (child,) = bench.fork(ids[2])
    found, token = [], ""
    while True:
        page = bench.engine.observer.list(TENANT, page_size=3, page_token=token)
        found += [view.id for view in page.contexts]
        token = page.next_page_token
        if not token:
            break
    assert sorted(found) == sorted([*ids, child])
    tree = bench.engine.observer.list(TENANT, root_id=ids[2]).contexts
    assert {view.id for view in tree} == {ids[2], child}


def test_busy_and_moved_contexts_are_refused() -> None:
    """Catches two requests that change one context, and a retry applied twice."""
    bench = Bench()
    context = bench.create(numbers(1, 20))
    stream = bench.start(context, 5)
    params = SamplingParams()
    for call in (
        lambda: bench.engine.contexts.extend(TENANT, context, [1]),
        lambda: bench.engine.inference.generate(TENANT, context, params),
        lambda: bench.engine.contexts.truncate(TENANT, context, 1),
    ):
        with pytest.raises(ContextBusy):
            call()
    bench.finish(stream)
    for moved in (
        lambda: bench.engine.contexts.extend(TENANT, context, [1], expected_length=20),
        lambda: bench.engine.inference.generate(TENANT, context, params, expected_length=20),
        lambda: bench.engine.contexts.truncate(TENANT, context, 1, expected_length=20),
    ):
        with pytest.raises(ContextMoved) as refusal:
            moved()
        assert refusal.value.actual_length == 25
    assert bench.engine.contexts.truncate(TENANT, context, 1, expected_length=25).length == 1


def test_fork_limits() -> None:
    """Catches a count, a position or a depth that is not checked before anything changes."""
    bench = Bench(limits=LimitsConfig(max_fork_count=3, max_depth=1, max_contexts=6))
    context = bench.create(numbers(1, 20))
    for count in (0, -1, 4, 2**31):
        with pytest.raises(InvalidRequest):
            bench.fork(context, count)
    for position in (-1, 21):
        with pytest.raises(InvalidRequest) as refusal:
            bench.fork(context, at=position)
        assert refusal.value.reason is Reason.POSITION_OUT_OF_RANGE
    (child,) = bench.fork(context)
    with pytest.raises(PoolExhausted) as deep:
        bench.fork(child)
    assert deep.value.metadata["quota"] == "depth"
    bench.fork(context, 3)
    with pytest.raises(PoolExhausted) as many:
        bench.fork(context, 2)
    assert many.value.reason is Reason.TENANT_QUOTA
    bench.fork(context)
    with pytest.raises(PoolExhausted):
        bench.engine.contexts.create(TENANT, [1])
    bench.end()


def test_full_queue_refuses_without_a_trace() -> None:
    """Catches some of a refused call's requests queued, or advice to try in vain again."""
    bench = Bench(max_waiting=2)
    context = bench.create(numbers(1, 20))
    params = SamplingParams()
    for call in (
        lambda: bench.engine.inference.generate_branches(TENANT, context, 3, params),
        lambda: bench.engine.inference.score(TENANT, context, [[1], [2], [3]]),
    ):
        with pytest.raises(PoolExhausted) as refusal:
            call()
        assert refusal.value.reason is Reason.QUEUE_FULL
        assert refusal.value.retry_after is None, "no wait makes room for three"
        assert not bench.engine.has_work
        assert bench.engine.view().num_contexts == 1
        bench.audit()
    bench.end()


@pytest.mark.parametrize("token", [-1, 1000, 2**31, 2**63 - 1])
def test_tokens_beyond_the_vocabulary(token: int) -> None:
    """Catches an id that would index past the logits, or past 32 bits."""
    bench = Bench()
    context = bench.create([1, 999])
    for call in (
        lambda: bench.engine.contexts.create(TENANT, [1, token]),
        lambda: bench.engine.contexts.extend(TENANT, context, [token]),
        lambda: bench.engine.inference.score(TENANT, context, [[1], [token]]),
    ):
        with pytest.raises(InvalidRequest) as refusal:
            call()
        assert refusal.value.reason is Reason.TOKEN_OUT_OF_RANGE
    assert not bench.engine.has_work
    bench.end()


def fail_next_step(bench: Bench) -> None:
    """Lets every step from now on raise."""

    def fail(_: object) -> None:
        raise RuntimeError("the device failed")

    bench.runner.before_step = fail
