"""With native 8-bit weights a branch's numbers are the same to the bit, whoever else is there."""

from typing import Any

import pytest
import torch
from tiny_engines import TinyEngine
from tiny_models import build_tiny_model
from transformers import PreTrainedModel

from agentkv.config import SchedulerConfig
from agentkv.engine.outputs import Chunk
from agentkv.model.fused_layer import fuse_layers
from agentkv.model.fused_model import fuse_model
from agentkv.model.int8_linear import quantise_linears
from agentkv.model.model_shape import describe_model
from agentkv.sampling_params import SamplingParams
from agentkv_kernels import native
from agentkv_kernels.int8_weights import Int8Products

TENANT = "t"
LEVELS = native.available_levels()
SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16}
PROMPT = [3 + 7 * index % 90 for index in range(150)]
GREEDY = SamplingParams(max_tokens=40, ignore_eos=True, logprobs=True)


def fused_model(family: str = "llama") -> PreTrainedModel:
    """A tiny model that one native call computes, but for attention."""
    model = build_tiny_model(family, max_position_embeddings=1024, **SIZES)
    describe_model(model)
    products = Int8Products(native.native_at(LEVELS[0]))
    quantise_linears(model, products)
    assert fuse_model(model, fuse_layers(model, products))
    return model


def continued(
    model: PreTrainedModel,
    *,
    siblings: int = 0,
    strangers: int = 0,
    token_budget: int = 512,
    num_blocks: int = 600,
    params: SamplingParams = GREEDY,
) -> tuple[list[int], list[float]]:
    """Generates on a branch of the prompt, in some company; gives tokens and log-probabilities."""
    scheduler = SchedulerConfig(token_budget=token_budget)
    tiny = TinyEngine(model, num_blocks=num_blocks, scheduler=scheduler, max_length=1024)
    engine = tiny.engine
    wild = SamplingParams(max_tokens=60, ignore_eos=True, temperature=1.0, seed=5)
    if strangers:
        other = engine.run(engine.contexts.create(TENANT, PROMPT[50:120])).answer.context
        engine.inference.generate_branches(TENANT, other.id, strangers, wild)
    root = engine.run(engine.contexts.create(TENANT, PROMPT)).answer.context
    if siblings:
        engine.inference.generate_branches(TENANT, root.id, siblings, wild)
    generation = engine.inference.generate_branches(TENANT, root.id, 1, params)
    tokens: list[int] = []
    logprobs: list[float] = []
    while not generation.is_done:
        engine.step()
        for news in generation.take_news():
            if isinstance(news, Chunk):
                tokens += news.token_ids
                logprobs += news.logprobs
    assert len(tokens) == len(logprobs) == params.max_tokens
    return tokens, logprobs


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_in_company(family: str) -> None:
    """Catches anything in a step that depends on how many rows it has, or on what they are."""
    model = fused_model(family)
    alone = continued(model)
    assert continued(model, siblings=6) == alone
    assert continued(model, siblings=29, strangers=5) == alone


def test_in_chunks() -> None:
    """Catches KV that depends on how many tokens of a prompt are computed at once."""
    model = fused_model()
    alone = continued(model)
    assert continued(model, token_budget=17) == alone
    assert continued(model, token_budget=64, strangers=9) == alone


def test_by_threads() -> None:
    """Catches work whose sums depend on how it was divided."""
    model, before = fused_model(), torch.get_num_threads()
    results = []
    try:
        for num_threads in (1, 2, 3):
            torch.set_num_threads(num_threads)
            results.append(continued(model, siblings=num_threads))
    finally:
        torch.set_num_threads(before)
    assert results[1] == results[0]
    assert results[2] == results[0]


def test_after_giving_way() -> None:
    """Catches a branch that is computed again, as a chunk, to other bits than it had."""
    model = fused_model()
    # 38 blocks hold the prompt; twelve branches of up to 15 blocks do not fit into the rest.
    assert continued(model, siblings=11, num_blocks=110) == continued(model)


def test_with_guesses() -> None:
    """Catches drafts, which are rows of a chunk, that are judged by other logits than a run has."""
    model = fused_model()
    guessing = SamplingParams(
        max_tokens=40, ignore_eos=True, logprobs=True, num_speculative_tokens=8
    )
    assert continued(model, params=guessing) == continued(model)
