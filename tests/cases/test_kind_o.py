"""Cases of kind O that need no wire: what is refused changes nothing."""

from functools import partial
from typing import Any

import pytest
from bench import TENANT, Bench, finish_of, numbers, tokens_of
from fakes import VOCAB_SIZE, continuation
from tiny_engines import TinyEngine
from tiny_models import build_tiny_model

from agentkv.config import QuotaConfig, QuotasConfig
from agentkv.core.request import FinishReason
from agentkv.errors import AgentKVError, InvalidRequest, PoolExhausted, Reason
from agentkv.sampling_params import SamplingParams


def test_case_100_empty_prompt() -> None:
    """Catches zero-sized work that reaches an assertion, and harms a neighbour."""
    bench = Bench()
    prompt = numbers(1, 20)
    neighbour = bench.create(prompt)
    stream = bench.start(neighbour, 10)
    bench.step()
    with pytest.raises(InvalidRequest):
        bench.engine.contexts.create(TENANT, [])
    context = bench.create(numbers(2, 5))
    answer = bench.extend(context, [])
    assert answer.context.length == 5
    assert answer.usage.computed_tokens == 0
    bench.truncate(context, 0)
    (child,) = bench.fork(context)
    assert bench.length(child) == 0
    for empty in (context, child):
        with pytest.raises(InvalidRequest):
            bench.start(empty, 1)
        with pytest.raises(InvalidRequest):
            bench.engine.inference.score(TENANT, empty, [[1]])
    bench.extend(child, prompt)
    assert bench.generate(child, 3) == continuation(prompt, 3)
    bench.finish(stream)
    assert bench.tokens(neighbour) == prompt + continuation(prompt, 10)
    bench.end()


def test_case_102_quotas_refuse_before_work_grows() -> None:
    """Catches a count that is believed before a quota is looked at, and work done for it."""
    quotas = QuotasConfig(default=QuotaConfig(contexts=8, fan_out=4, blocks=4))
    bench = Bench(quotas=quotas)
    root = bench.create(numbers(6, 20))
    before = bench.pool_view, bench.engine.view(), bench.engine.observer.usage(TENANT).bill
    for count in (0, 5, 5_000_000, 2**31 - 1):
        reason = Reason.TENANT_QUOTA if count == 5 else Reason.INVALID_REQUEST
        with pytest.raises(AgentKVError) as refusal:
            bench.fork(root, count)
        assert refusal.value.reason is reason
        with pytest.raises(AgentKVError) as refusal:
            bench.engine.inference.generate_branches(TENANT, root, count, SamplingParams())
        assert refusal.value.reason is reason
    with pytest.raises(PoolExhausted) as exhausted:
        bench.create(numbers(7, 100))
    assert exhausted.value.metadata["quota"] == "blocks"
    assert (
        bench.pool_view,
        bench.engine.view(),
        bench.engine.observer.usage(TENANT).bill,
    ) == before
    bench.end()


@pytest.mark.parametrize("chunk", [7, 256])
def test_case_105_exact_context_limit(chunk: int) -> None:
    """Catches an off-by-one at the longest context, in any of the paths that reach it."""
    bench = Bench(max_length=64, chunk=chunk)
    prompt = numbers(3, 65)

    sixty = bench.create(prompt[:60])
    updates = bench.finish(bench.start(sixty, 10))
    assert tokens_of(updates) == continuation(prompt[:60], 4)
    assert finish_of(updates).reason is FinishReason.LENGTH

    almost = bench.create(prompt[:63])
    assert bench.generate(almost, 1) == continuation(prompt[:63], 1)

    full = bench.create(prompt[:64])
    (child,) = bench.fork(full)
    for context in (sixty, almost, full, child):
        assert bench.length(context) == 64
        for call in (
            lambda name=context: bench.start(name, 1),
            lambda name=context: bench.extend(name, [1]),
            lambda name=context: bench.engine.inference.score(TENANT, name, [[1]]),
        ):
            with pytest.raises(InvalidRequest) as refusal:
                call()
            assert refusal.value.reason is Reason.CONTEXT_TOO_LONG
        assert bench.length(context) == 64
        assert len(bench.blocks(context)) <= 4
    with pytest.raises(InvalidRequest) as refusal:
        bench.engine.contexts.create(TENANT, prompt)
    assert refusal.value.reason is Reason.CONTEXT_TOO_LONG
    assert max(p for batch in bench.runner.batches for p in batch.positions) <= 63
    bench.end()


def test_case_105_exact_context_limit_after_preemption() -> None:
    """Catches a limit counted from the start of a resumed request."""
    bench = Bench(num_blocks=6, max_length=64)
    prompts = [numbers(4, 40), numbers(5, 24)]
    contexts = [bench.create(prompt) for prompt in prompts]
    streams = [bench.start(context, 60) for context in contexts]
    bench.finish(*streams)
    assert bench.engine.view().num_preemptions > 0
    for context, prompt in zip(contexts, prompts, strict=True):
        assert bench.tokens(context) == prompt + continuation(prompt, 64 - len(prompt))
    bench.end()


@pytest.mark.parametrize(
    "option",
    ["stop_token_ids", "allowed_token_ids", "banned_token_ids", "logit_bias"],
)
def test_case_103_unknown_stop_or_bias_id(option: str) -> None:
    """Catches an id used as an index without a check: it would write into a neighbour's logits."""
    made = TinyEngine(build_tiny_model("llama"))
    engine, width = made.engine, made.engine.facts.vocab_size
    prompt = [(3 * i + 1) % width for i in range(10)]
    drawn = SamplingParams(max_tokens=8, temperature=1.0, seed=3)

    def run_with(token: int | None) -> list[int]:
        neighbour = engine.run(engine.contexts.create(TENANT, prompt)).answer.context.id
        other = engine.run(engine.contexts.create(TENANT, prompt[:5])).answer.context.id
        stream = engine.inference.generate(TENANT, neighbour, drawn)
        operations = [stream]
        if token is not None:
            value: Any = ((token, 1.0),) if option == "logit_bias" else (token,)
            params = SamplingParams(max_tokens=8, **{option: value})
            if token >= width:
                for begin in (
                    engine.inference.generate,
                    partial(engine.inference.generate_branches, count=2),
                ):
                    with pytest.raises(InvalidRequest) as refusal:
                        begin(TENANT, other, params=params)
                    assert refusal.value.reason is Reason.TOKEN_OUT_OF_RANGE
                    assert list(refusal.value.violations) == [option]
            else:
                operations.append(engine.inference.generate(TENANT, other, params))
        for operation in operations:
            engine.run(operation)
        engine.contexts.release(TENANT, [neighbour, other])
        engine.check()
        return tokens_of(stream.take_news())

    alone = run_with(None)
    assert run_with(width + 3) == run_with(width + 1) == run_with(width) == alone
    # The limit is the width of the logits, not the number of tokens that the tokenizer knows.
    assert run_with(width - 1) == alone


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"banned_token_ids": tuple(range(VOCAB_SIZE))}, "banned_token_ids"),
        ({"allowed_token_ids": (7, 8), "stop_token_ids": (7, 8), "min_tokens": 1},
         "allowed_token_ids"),
    ],
)  # fmt: skip
def test_options_that_leave_no_token_are_refused(options: dict[str, Any], field: str) -> None:
    """Catches a request that could only fail at its first token."""
    bench = Bench()
    context = bench.create(numbers(1, 5))
    with pytest.raises(InvalidRequest) as refusal:
        bench.start(context, 3, **options)
    assert list(refusal.value.violations) == [field]
    assert bench.length(context) == 5
    bench.end()
