"""Streams: the order of updates, texts, stops, seeds."""

import pytest
from bench import TENANT, Bench, finish_of, numbers, text_of, tokens_of
from fakes import continuation, logprob

from agentkv.core.batch import Stream
from agentkv.core.request import FinishReason
from agentkv.engine.outputs import Branches, Chunk, Finish
from agentkv.errors import InvalidRequest, Reason
from agentkv.sampling_params import SamplingParams

PIECES = ("a", " st", "one", " wa", "ll", "z", " wi", "ok", "!?!", "<end>")


def test_a_stream_in_order() -> None:
    """Catches updates out of order, more than one chunk a step, and tokens told twice."""
    bench = Bench()
    prompt = numbers(1, 20)
    stream = bench.start(bench.create(prompt), 3, logprobs=True)
    assert stream.take_news() == ()
    seen = []
    while not stream.is_done:
        bench.step()
        seen.append(stream.take_news())
    assert [[type(update) for update in news] for news in seen] == [
        [Chunk],
        [Chunk],
        [Chunk, Finish],
    ]
    assert stream.take_news() == ()
    expected = continuation(prompt, 3)
    path = list(prompt)
    for (chunk, *_), token in zip(seen, expected, strict=True):
        assert chunk == Chunk(0, (token,), f" {token}", (logprob(path, token),))
        path.append(token)
    finish = finish_of(seen[-1])
    assert finish.reason is FinishReason.LENGTH
    assert finish.seed is None and finish.stop is None and finish.error is None
    assert finish.context is not None
    assert (finish.context.length, finish.context.is_busy) == (23, False)


def test_news_gathers_while_nobody_reads() -> None:
    """Catches tokens lost, or a message per token, when a reader is slow."""
    bench = Bench()
    prompt = numbers(1, 20)
    stream = bench.start(bench.create(prompt), 5)
    bench.drain()
    chunk, finish = stream.take_news()
    assert isinstance(chunk, Chunk) and isinstance(finish, Finish)
    assert list(chunk.token_ids) == continuation(prompt, 5)


def test_branches_come_first_and_once() -> None:
    """Catches a branch whose handle is known only after its tokens."""
    bench = Bench()
    context = bench.create(numbers(1, 20))
    group = bench.engine.inference.generate_branches(
        TENANT, context, 3, SamplingParams(max_tokens=4), at=10, labels={"k": "v"}
    )
    updates = bench.finish(group)
    first, *others = updates
    assert isinstance(first, Branches)
    assert not any(isinstance(update, Branches) for update in others)
    for number, view in enumerate(first.contexts):
        assert (view.parent_id, view.fork_position, view.labels) == (context, 10, (("k", "v"),))
        assert bench.tokens(view.id) == numbers(1, 20)[:10] + tokens_of(updates, number)
        assert finish_of(updates, number).reason is FinishReason.LENGTH
    assert bench.length(context) == 20
    bench.end()


@pytest.mark.parametrize(
    ("forced", "text", "stop", "num_before"),
    [
        ([0, 1, 2, 3, 4, 5], "a", " stone wall", 1),
        ([0, 1, 2, 6, 4, 5], "a stone willz", None, None),
        ([0, 1], "a st", None, None),
    ],
)
def test_stop_text_across_tokens(
    forced: list[int], text: str, stop: str | None, num_before: int | None
) -> None:
    """Catches the start of a stop text in the stream, and text lost when it was none."""
    bench = Bench(pieces=PIECES)
    prompt = numbers(1, 20)
    context = bench.create(prompt)
    bench.runner.forced = {0: list(forced)}
    updates = bench.finish(bench.start(context, len(forced), stop=(" stone wall",)))
    finish = finish_of(updates)
    assert text_of(updates) == text
    assert (finish.stop, finish.num_tokens_before_stop) == (stop, num_before)
    assert finish.reason is (FinishReason.STOP if stop else FinishReason.LENGTH)
    committed = forced[:5] if stop else forced
    assert bench.tokens(context) == prompt + committed
    assert finish.usage.generated_tokens == len(committed)
    bench.end()


def test_stop_text_that_ends_inside_a_token() -> None:
    """Catches positions that follow the text cut instead of the committed tokens."""
    bench = Bench(pieces=PIECES)
    context = bench.create([100, 101])
    bench.runner.forced = {0: [7, 8]}
    updates = bench.finish(bench.start(context, 9, stop=("!?",)))
    assert text_of(updates) == "ok"
    assert finish_of(updates).num_tokens_before_stop == 1
    assert bench.tokens(context) == [100, 101, 7, 8]
    bench.extend(context, [102, 103])
    path = [100, 101, 7, 8, 102, 103]
    assert bench.generate(context, 3) == continuation(path, 3)
    bench.end()


@pytest.mark.parametrize("end", ["model", "request"])
def test_stop_tokens(end: str) -> None:
    """Catches a stop token that is not committed, or whose text is streamed."""
    bench = Bench(pieces=PIECES, end_token_ids=[9] if end == "model" else [])
    context = bench.create([100, 101])
    bench.runner.forced = {0: [0, 9, 5]}
    options = {} if end == "model" else {"stop_token_ids": (9,)}
    updates = bench.finish(bench.start(context, 9, **options))
    finish = finish_of(updates)
    assert finish.reason is FinishReason.STOP
    assert (text_of(updates), tokens_of(updates)) == ("a", [0, 9])
    assert (finish.stop, finish.num_tokens_before_stop) == (None, 1)
    assert bench.tokens(context) == [100, 101, 0, 9]
    bench.end()


def test_end_of_sequence_can_be_ignored() -> None:
    """Catches an option that is accepted and has no effect; the request's own ids still stop."""
    bench = Bench(pieces=PIECES, end_token_ids=[9])
    context = bench.create([100, 101])
    bench.runner.forced = {0: [9, 0, 5, 1]}
    updates = bench.finish(bench.start(context, 9, ignore_eos=True, stop_token_ids=(5,)))
    assert tokens_of(updates) == [9, 0, 5]
    bench.end()


def test_stop_token_beyond_the_vocabulary() -> None:
    """Catches an id used as an index without a check."""
    bench = Bench()
    context = bench.create([1])
    with pytest.raises(InvalidRequest) as refusal:
        bench.start(context, 1, stop_token_ids=(1000,))
    assert refusal.value.reason is Reason.TOKEN_OUT_OF_RANGE
    assert bench.generate(context, 1, stop_token_ids=(999,)) == continuation([1], 1)


def test_branches_draw_from_streams_of_their_own() -> None:
    """Catches branches that repeat one another, and a branch that cannot be replayed."""
    runs = []
    for _ in range(2):
        bench = Bench()
        prompt = numbers(1, 20)
        context = bench.create(prompt)
        params = SamplingParams(max_tokens=6, temperature=1, seed=42)
        group = bench.engine.inference.generate_branches(TENANT, context, 4, params)
        updates = bench.finish(group)
        runs.append([tokens_of(updates, branch) for branch in range(4)])
        assert {finish_of(updates, branch).seed for branch in range(4)} == {42}
    assert runs[0] == runs[1]
    assert len({tuple(tokens) for tokens in runs[0]}) == 4
    ordinals = [request.stream.ordinal for request in group.requests]
    assert runs[0] == [continuation(prompt, 6, Stream(42, ordinal)) for ordinal in ordinals]


def test_fork_then_generate_draws_like_generate_branches() -> None:
    """Catches a stream that depends on which call made the branch."""
    tokens = []
    for is_one_call in (True, False):
        bench = Bench()
        context = bench.create(numbers(1, 20))
        params = SamplingParams(max_tokens=6, temperature=1, seed=42)
        if is_one_call:
            updates = bench.finish(
                bench.engine.inference.generate_branches(TENANT, context, 3, params)
            )
            tokens.append([tokens_of(updates, branch) for branch in range(3)])
        else:
            children = bench.fork(context, 3)
            tokens.append([bench.generate(child, 6, temperature=1, seed=42) for child in children])
    assert tokens[0] == tokens[1]


def test_a_seed_is_drawn_and_told() -> None:
    """Catches a default seed shared by all requests, and one that nobody can replay."""
    bench = Bench()
    prompt = numbers(1, 20)
    first, second = bench.fork(bench.create(prompt), 2)
    seeds = []
    for context in (first, second):
        updates = bench.finish(bench.start(context, 4, temperature=1))
        seed = finish_of(updates).seed
        assert seed is not None
        seeds.append(seed)
        tokens = tokens_of(updates)
        bench.truncate(context, 20)
        assert bench.generate(context, 4, temperature=1, seed=seed) == tokens
    assert seeds[0] != seeds[1]
    greedy = bench.finish(bench.start(first, 1, temperature=1, top_k=1, seed=5))
    assert finish_of(greedy).seed is None
    bench.end()
