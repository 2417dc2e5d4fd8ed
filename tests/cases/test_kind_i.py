"""Cases of kind I: beams and trees over shared blocks leave nothing behind and lose nothing."""

import asyncio

import pytest
import torch
from bench import TENANT, Bench, numbers, tokens_of
from fakes import continuation, logprob
from server.harness import run
from server.real_engine import MAX_LENGTH, really_serving
from slow_twin import PlainModel
from tiny_engines import TEXT_VOCAB_SIZE, load_tiny
from tiny_models import build_tiny_model

from agentkv.client.async_client import AsyncClient
from agentkv.config import EngineConfig
from agentkv.engine.build import build_engine_for
from agentkv.search.beam_search import beam_search_async


def test_case_068_trial_tokens_leave_nothing() -> None:
    """Catches a rejected candidate that stays visible, by fork, by truncation or by scoring."""
    bench = Bench(block_size=16)
    prompt, candidates = numbers(1, 20), [5, 6, 7]
    context = bench.create(prompt)
    cold = [logprob(prompt, token) for token in candidates]
    follow = [continuation([*prompt, token], 3) for token in candidates]
    for child, token, value, after in zip(
        bench.fork(context, 3), candidates, cold, follow, strict=True
    ):
        operation = bench.engine.contexts.extend(TENANT, child, [token], logprobs=True)
        assert list(bench.run(operation).answer.logprobs) == [value]
        assert bench.generate(child, 3) == after
        bench.release(child)
    free = bench.free
    for token, value, after in zip(candidates, cold, follow, strict=True):
        operation = bench.engine.contexts.extend(TENANT, context, [token], logprobs=True)
        assert list(bench.run(operation).answer.logprobs) == [value]
        assert bench.generate(context, 3) == after
        bench.truncate(context, 20)
    assert (bench.length(context), bench.free) == (20, free)
    scores = bench.score(context, [[token] for token in candidates]).scores
    assert [list(score.logprobs) for score in scores] == [[value] for value in cold]
    bench.end()


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2", "gemma3"])
def test_case_070_beams_of_every_kind_of_attention(family: str) -> None:
    """Catches beams whose KV is not their own: full, windowed and mixed layers."""
    loaded = load_tiny(family, max_position_embeddings=MAX_LENGTH)
    twin = PlainModel(
        build_tiny_model(family, vocab_size=TEXT_VOCAB_SIZE, max_position_embeddings=MAX_LENGTH)
    )
    prompt = [(13 * number + 7) % 250 + 3 for number in range(40)]

    async def scenario() -> None:
        engine = build_engine_for(loaded, EngineConfig(num_blocks=256, max_length=MAX_LENGTH))
        async with (
            really_serving(engine) as served,
            AsyncClient(served.server.address) as client,
        ):
            root = await client.create(token_ids=prompt)
            found = await beam_search_async(root, num_beams=3, max_tokens=8)
        assert len(found) == 3
        for item in found:
            rows = twin.logits([*prompt, *item.token_ids]).log_softmax(-1)[len(prompt) - 1 : -1]
            total = float(rows.gather(1, torch.tensor(item.token_ids)[:, None]).sum())
            assert item.logprob == pytest.approx(total, abs=1e-4)
            assert item.score == pytest.approx(total / 8, abs=1e-4)

    run(asyncio.wait_for(scenario(), 60))


def test_case_071_a_group_whose_members_are_gone_is_preempted() -> None:
    """Catches a preemption that still counts on branches that were released or cancelled."""
    bench = Bench(num_blocks=12, block_size=4)
    prompt = numbers(1, 16)
    root = bench.create(prompt)
    children = bench.fork(root, 4)
    streams = [bench.start(child, 20) for child in children]
    while bench.length(children[3]) < 21:
        bench.step()
    told = [tokens_of(stream.take_news()) for stream in streams]
    bench.engine.contexts.release(TENANT, [children[1]])
    bench.engine.cancel(streams[2])
    kept = bench.tokens(children[2])
    other = bench.start(bench.create(numbers(9, 9)), 3)
    rest = [tokens_of(bench.finish(streams[number])) for number in (0, 3)]
    bench.finish(other)
    for child, begun, ended in ((0, told[0], rest[0]), (3, told[3], rest[1])):
        assert begun + ended == continuation(prompt, 20)
        assert bench.tokens(children[child]) == prompt + continuation(prompt, 20)
    assert bench.tokens(children[2]) == kept == (prompt + continuation(prompt, 20))[: len(kept)]
    assert bench.engine.view().num_preemptions > 0, "nobody had to wait"
    bench.end()
