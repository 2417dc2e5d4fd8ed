"""Who gets rows in a step, and who waits or gives way."""

from bench import TENANT, Bench, numbers, tokens_of
from fakes import continuation

from agentkv.core.request import Request


def running(bench: Bench) -> list[Request]:
    """The requests that run, oldest first."""
    return bench.engine._scheduler.queues.running


def waiting(bench: Bench) -> list[Request]:
    """The requests that wait, oldest first."""
    return bench.engine._scheduler.queues.waiting


def drop_kv(bench: Bench, context_id: str) -> None:
    """Lets an idle context lose its KV, as pressure would."""
    bench.release(bench.create(numbers(99, bench.pool_view.total * bench.block_size)))
    assert bench.view(context_id).num_computed == 0


def test_requests_start_in_order_of_arrival() -> None:
    """Catches a later request that starts while an earlier one could."""
    bench = Bench(max_running=2)
    contexts = [bench.create(numbers(n, 5)) for n in range(4)]
    streams = [bench.start(context, 2) for context in contexts]
    assert waiting(bench) == [stream.requests[0] for stream in streams]
    bench.step()
    assert running(bench) == [stream.requests[0] for stream in streams[:2]]
    bench.drain()


def test_no_more_requests_run_than_a_step_has_rows() -> None:
    """Catches a running request that gets no row although it decodes."""
    bench = Bench(budget=3, chunk=3)
    streams = [bench.start(bench.create(numbers(n, 5)), 4) for n in range(5)]
    while bench.engine.has_work:
        bench.step()
        assert len(running(bench)) <= 3
        assert bench.runner.batches[-1].num_rows <= 3
    for number, stream in enumerate(streams):
        assert tokens_of(stream.take_news()) == continuation(numbers(number, 5), 4)


def test_decode_rows_come_first_in_the_budget() -> None:
    """Catches a chunk that leaves no row for a branch that decodes."""
    bench = Bench(budget=6, chunk=6)
    stream = bench.start(bench.create(numbers(1, 5)), 8)
    bench.steps(2)
    create = bench.engine.contexts.create(TENANT, numbers(2, 13))
    num_rows = []
    while not create.is_done:
        before = bench.length(stream.requests[0].context.id)
        bench.step()
        assert bench.length(stream.requests[0].context.id) == before + 1
        num_rows.append(bench.runner.batches[-1].num_rows)
    assert num_rows == [6, 6, 4]


def test_chunk_that_finds_the_budget_spent_waits_a_step() -> None:
    """Catches a step with more rows than its budget, or a chunk of none."""
    bench = Bench(num_blocks=32, block_size=2, budget=4, chunk=4)
    prompt = numbers(1, 18)
    a = bench.create(prompt)
    drop_kv(bench, a)
    (b,) = bench.fork(a)
    stream = bench.start(a, 6)
    extend = bench.engine.contexts.extend(TENANT, b, numbers(2, 10))  # waits for what `a` computes
    create = bench.engine.contexts.create(TENANT, numbers(3, 10))
    while bench.engine.has_work:
        bench.step()
        assert bench.runner.batches[-1].num_rows <= 4
    assert tokens_of(stream.take_news()) == continuation(prompt, 6)
    assert extend.error is None and create.error is None
    assert bench.tokens(b) == prompt + numbers(2, 10)
    bench.end()


def test_two_requests_never_compute_the_same_tokens() -> None:
    """Catches a shared path computed once per branch after its KV gave way."""
    bench = Bench(num_blocks=16, chunk=8)
    prompt = numbers(1, 40)
    parent = bench.create(prompt)
    children = bench.fork(parent, 3)
    drop_kv(bench, parent)
    first_batch = len(bench.runner.batches)
    bench.finish(*[bench.start(child, 2) for child in children])
    positions = [p for b in bench.runner.batches[first_batch:] for p in b.positions if p < 40]
    assert positions == list(range(40))
    for child in children:
        assert bench.tokens(child) == prompt + continuation(prompt, 2)
    bench.end()


def test_the_youngest_gives_way() -> None:
    """Catches the oldest request preempted, so that none ever ends."""
    bench = Bench(num_blocks=6, block_size=4)
    streams = [bench.start(bench.create(numbers(n, 7)), 14) for n in range(3)]
    oldest = streams[0].requests[0]
    while not streams[0].is_done:
        bench.step()
        if running(bench):
            assert running(bench)[0] is oldest
    assert bench.engine.view().num_preemptions > 0
    bench.drain()
    for number, stream in enumerate(streams):
        assert tokens_of(stream.take_news()) == continuation(numbers(number, 7), 14)
    bench.end()


def test_a_pinned_request_is_not_preempted() -> None:
    """Catches pinned KV taken from a request that is younger than who needs a block."""
    bench = Bench(num_blocks=9, block_size=4)
    old, middle = (bench.create(numbers(n, 8)) for n in (1, 2))
    pinned = bench.create(numbers(3, 8), pinned=True)
    streams = [bench.start(context, 7) for context in (old, middle, pinned)]
    while not streams[2].is_done:
        bench.step()
        assert bench.view(pinned).num_computed >= bench.length(pinned) - 1
    assert bench.engine.view().num_preemptions > 0
    bench.drain()
    for number, stream in enumerate(streams, start=1):
        assert tokens_of(stream.take_news()) == continuation(numbers(number, 8), 7)
    bench.end()


def test_refused_on_the_way_when_pins_are_in_the_way() -> None:
    """Catches a request that waits for blocks that can never come: pins came while it waited."""
    bench = Bench(num_blocks=6, block_size=4, max_running=1)
    pinned = bench.create(numbers(1, 8), pinned=True)
    stream = bench.start(pinned, 12)
    create = bench.engine.contexts.create(TENANT, numbers(2, 16))
    bench.drain()
    assert stream.error is None
    assert create.error is not None
    assert create.error.metadata["need"] == "4"
    assert bench.engine.view().num_contexts == 1
    bench.end()


def test_watermark_is_left_to_those_who_run() -> None:
    """Catches an admission that takes the last blocks, and so preempts at once."""
    bench = Bench(num_blocks=8, block_size=4, watermark=2)
    stream = bench.start(bench.create(numbers(1, 8)), 30)
    bench.step()
    create = bench.engine.contexts.create(TENANT, numbers(2, 20))
    bench.step()
    assert not create.is_done and create.requests[0] in waiting(bench)
    bench.engine.cancel(stream)
    bench.run(create)
    bench.end()
