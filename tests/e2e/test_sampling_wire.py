"""Sampling options and log-probabilities from the client to a real model and back."""

import pytest
from server.harness import run
from server.real_engine import MAX_LENGTH, really_serving, tiny_engine
from slow_twin import PlainModel
from tiny_engines import TEXT_VOCAB_SIZE
from tiny_models import build_tiny_model

from agentkv.client.async_client import AsyncClient
from agentkv.errors import InvalidRequest, Reason

pytestmark = pytest.mark.slow

PROMPT = [(17 * number + 5) % 250 + 3 for number in range(40)]


def plain() -> PlainModel:
    return PlainModel(
        build_tiny_model("llama", vocab_size=TEXT_VOCAB_SIZE, max_position_embeddings=MAX_LENGTH)
    )


def test_options_and_logprobs_from_end_to_end() -> None:
    """Catches an option that is carried everywhere and used nowhere."""

    async def scenario() -> None:
        twin = plain()
        async with (
            really_serving(tiny_engine()) as served,
            AsyncClient(served.server.address) as client,
        ):
            root = await client.create(token_ids=PROMPT, logprobs=True)
            twin.check_logprobs(PROMPT[:1], PROMPT[1:], root.prompt_logprobs)

            greedy = await (await root.fork_one()).complete(max_tokens=4)
            banned = sorted(set(greedy.token_ids))
            branches = await root.complete_branches(
                3,
                max_tokens=6,
                logprobs=True,
                top_logprobs=5,
                banned_token_ids=banned,
                stop_token_ids=[100],
                min_tokens=2,
                logit_bias={100: 60.0},  # likelier than all else, once it may be chosen
                repetition_penalty=1.2,
                penalize_prompt=True,
            )
            for branch in branches:
                tokens = branch.completion.token_ids
                assert not set(tokens) & set(banned)
                assert len(tokens) == 3, "a token that ends it came too early or too late"
                assert tokens[2] == 100
                twin.check_logprobs(PROMPT, tokens, branch.completion.logprobs)
                tops = branch.completion.top_logprobs
                assert [len(top.token_ids) for top in tops] == [5] * 3
                twin.check_top(PROMPT, tokens, tops)

            allowed = await (await root.fork_one()).complete(
                max_tokens=8, temperature=2.0, seed=4, allowed_token_ids=[7, 8, 9]
            )
            assert set(allowed.token_ids) <= {7, 8, 9}

            choice = await root.choose([[3, 4], [200], list(greedy.token_ids)], by_mean=False)
            totals = [score.total for score in choice.scores]
            assert choice.index == totals.index(max(totals))
            for score in choice.scores:
                twin.check_logprobs(PROMPT, score.token_ids, score.logprobs)
            with pytest.raises(InvalidRequest) as refusal:
                await root.complete(logit_bias={TEXT_VOCAB_SIZE: 1.0})
            assert refusal.value.reason is Reason.TOKEN_OUT_OF_RANGE
            assert root.length == len(PROMPT)
            await root.release(recursive=True)

    run(scenario())
