"""Guessing ahead: the same answers as without, in fewer steps, at nobody's expense."""

from array import array
from typing import Any

import pytest
from bench import TENANT, Bench, finish_of, numbers, text_of, tokens_of
from fakes import continuation, mostly_right

from agentkv.core.batch import Batch
from agentkv.core.request import FinishReason
from agentkv.engine.outputs import Chunk, Update
from agentkv.sampling_params import SamplingParams

PIECES = ("a", " st", "one", " wa", "ll", "z", " wi", "ok", "!?!", "<end>")


def always_right(tokens: "array[int]", limit: int) -> list[int]:
    """Guesses what the fake model says."""
    return continuation(tokens, limit)


def nonsense(tokens: "array[int]", limit: int) -> list[int]:
    """Guesses wrong."""
    return [(guess + 1) % 1000 for guess in continuation(tokens, limit)]


def said(news: list[Update]) -> dict[str, Any]:
    """Everything a stream said that must not depend on drafts."""
    finish = finish_of(news)
    chunks = [update for update in news if isinstance(update, Chunk)]
    return {
        "tokens": tokens_of(news),
        "text": text_of(news),
        "logprobs": [value for chunk in chunks for value in chunk.logprobs],
        "reason": finish.reason,
        "stop": finish.stop,
        "before_stop": finish.num_tokens_before_stop,
        "length": finish.context and finish.context.length,
        "generated": finish.usage.generated_tokens,
    }


def test_right_guesses_save_steps() -> None:
    """Catches guesses that are checked one by one after all, or counted wrongly."""
    bench = Bench(draft=6, propose=always_right)
    prompt = numbers(1, 20)
    context = bench.create(prompt)
    before = len(bench.runner.batches)
    news = bench.finish(bench.start(context, 40))
    assert tokens_of(news) == continuation(prompt, 40)
    assert len(bench.runner.batches) - before < 12
    usage = finish_of(news).usage
    assert usage.drafted_tokens == usage.accepted_tokens > 28
    assert usage.computed_tokens == 39
    bench.end()


@pytest.mark.parametrize("propose", [always_right, mostly_right, nonsense])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 1.0, "seed": 5},
        {"repetition_penalty": 1.5, "min_tokens": 9, "logit_bias": ((3, 1.0),)},
        {"stop": ("ok!",)},
        {"num_speculative_tokens": 1},
    ],
)
@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_the_same_is_said(propose: Any, options: dict[str, Any], block_size: int) -> None:
    """Catches tokens, log-probabilities, lengths or an end that depend on guessing."""
    prompt, answers = numbers(1, 21), []
    for draft in (0, 7):
        bench = Bench(block_size=block_size, draft=draft, propose=propose, pieces=PIECES)
        context = bench.create(prompt)
        answers.append(said(bench.finish(bench.start(context, 33, logprobs=True, **options))))
        assert bench.tokens(context) == prompt + answers[-1]["tokens"]
        bench.end()
    assert answers[0] == answers[1]


def test_a_stop_text_inside_a_draft() -> None:
    """Catches tokens behind a stop that were committed because they came in the same step."""
    prompt, texts = [20, 30, 40], []
    tokens = continuation(prompt, 12)
    pieces = [f" {number}" for number in range(1000)]
    pieces[tokens[6]] = " halt!"
    for draft in (0, 12):
        bench = Bench(draft=draft, propose=always_right, pieces=pieces)
        context = bench.create(prompt)
        news = bench.finish(bench.start(context, 12, stop=("halt",)))
        texts.append(said(news))
        assert finish_of(news).reason is FinishReason.STOP
        assert bench.tokens(context) == prompt + tokens[:7]
        usage = bench.engine.observer.usage(TENANT, context_id=context)
        assert usage.bill.generated_tokens == 7
        assert bench.generate(context, 5) == continuation(prompt + tokens[:7], 5)
        bench.end()
    assert texts[0] == texts[1]


def test_an_end_token_ends_a_draft() -> None:
    """Catches a branch that goes on past its end of sequence because the next was guessed."""
    prompt = [20, 30, 40]
    tokens = continuation(prompt, 12)
    bench = Bench(draft=12, propose=always_right, end_token_ids=[tokens[5]])
    news = bench.finish(bench.start(bench.create(prompt), 12))
    assert tokens_of(news) == tokens[:6]
    finish = finish_of(news)
    assert (finish.reason, finish.num_tokens_before_stop) == (FinishReason.STOP, 5)


def test_limits_hold() -> None:
    """Catches a draft beyond max_tokens, or beyond the model's longest context."""
    bench = Bench(draft=16, propose=always_right, max_length=30)
    context = bench.create(numbers(1, 20))
    assert len(bench.generate(context, 4)) == 4
    news = bench.finish(bench.start(context, 99))
    assert finish_of(news).reason is FinishReason.LENGTH and bench.length(context) == 30
    assert max(position for batch in bench.runner.batches for position in batch.positions) < 30
    bench.end()


def test_wrong_guesses_leave_nothing() -> None:
    """Catches KV of a wrong guess that is kept, matched or forked, and blocks not given back."""
    bench = Bench(num_blocks=32, block_size=2, draft=8, propose=nonsense)
    prompt = numbers(1, 9)
    context = bench.create(prompt)
    stream = bench.start(context, 8)
    for count in range(1, 8):
        bench.step()
        assert bench.tokens(context) == prompt + continuation(prompt, count)
        assert bench.live == -(-(bench.length(context) - 1) // 2), "blocks behind the last token"
    (child,) = bench.fork(context)
    bench.finish(stream)
    wrong = bench.engine.view().computed_tokens
    assert wrong > 9 + 8, "nothing was guessed"
    assert bench.tokens(child) == prompt + continuation(prompt, 7)
    guessed = prompt + nonsense(array("I", prompt), 8)
    assert bench.created(guessed).usage.cached_tokens == 8, "only whole blocks of the prompt"
    bench.end()


def test_a_shared_block_is_copied_before_guesses_are_written() -> None:
    """Catches guesses written behind a row that runs for its logits only, where a fork cut."""
    bench = Bench(block_size=8, draft=4, propose=always_right)
    prompt = numbers(1, 14)
    context = bench.create(prompt)
    (other,) = bench.fork(context, at=12)
    (twin,) = bench.fork(context, at=12)
    bench.extend(twin, [5])
    bench.forget_logits(context)
    assert bench.generate(context, 9) == continuation(prompt, 9)
    assert bench.generate(other, 9) == continuation(prompt[:12], 9)
    bench.end()


def test_drafts_take_only_what_is_left() -> None:
    """Catches a branch preempted, cache evicted or a request that waits for somebody's guesses."""
    tallies = []
    for draft in (0, 8):
        bench = Bench(num_blocks=20, block_size=2, draft=draft, propose=nonsense)
        contexts = [bench.create(numbers(n, 6)) for n in range(2)]
        cached = bench.create(numbers(7, 12))
        bench.release(cached)
        streams = [bench.start(context, 8) for context in contexts]
        for stream in streams:
            bench.finish(stream)
        tallies.append((bench.engine.view().num_preemptions, bench.pool_view.cached))
        bench.end()
    assert tallies[0] == tallies[1]


def test_drafts_stay_within_the_rows_of_a_step() -> None:
    """Catches a step with more rows than its budget, and a branch that takes them all."""
    bench = Bench(budget=8, draft=8, propose=always_right)
    parent = bench.create(numbers(1, 20))
    params = SamplingParams(max_tokens=30)
    group = bench.engine.inference.generate_branches(TENANT, parent, 3, params)
    bench.finish(group)
    sizes = [batch.num_rows for batch in bench.runner.batches]
    assert max(sizes[2:]) <= 8
    assert any(size > 3 for size in sizes[2:]), "nothing was guessed"
    bench.end()


def test_a_failed_step_takes_its_draft_along() -> None:
    """Catches guesses left on a path by a step that raised, and by logits that are not finite."""
    bench = Bench(block_size=2, draft=6, propose=always_right)
    prompt = numbers(1, 9)
    context = bench.create(prompt)

    def fail(batch: Batch) -> None:
        if batch.num_rows > 4:
            raise RuntimeError("the device fell off")

    bench.runner.after_writes = fail
    news = bench.finish(bench.start(context, 20))
    assert finish_of(news).reason is FinishReason.ERROR
    assert bench.tokens(context) == prompt + tokens_of(news)
    bench.runner.after_writes = lambda batch: None
    bench.runner.non_finite = lambda sample: sample.position == 14
    news = bench.finish(bench.start(context, 20))
    assert finish_of(news).reason is FinishReason.ERROR
    assert bench.tokens(context) == prompt + continuation(prompt, 14 - 9)
    bench.end()


def test_a_request_may_decline() -> None:
    """Catches an option that the server's default overrides, in either direction."""
    for draft, asked, is_drafting in ((8, 0, False), (0, 8, True), (8, None, True)):
        bench = Bench(draft=draft, propose=always_right)
        context = bench.create(numbers(1, 20))
        news = bench.finish(bench.start(context, 12, num_speculative_tokens=asked))
        assert bool(finish_of(news).usage.drafted_tokens) is is_drafting
