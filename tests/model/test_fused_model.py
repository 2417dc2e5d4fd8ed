"""A model's short way: who takes it, and that it computes what the model itself does."""

from typing import Any

import pytest
import torch
from hand_forked import HandForked
from tiny_models import build_tiny_model
from torch import Tensor
from transformers import PreTrainedModel

from agentkv.model.fused_layer import fuse_layers
from agentkv.model.fused_model import ShortOutput, fuse_model
from agentkv.model.int8_linear import quantise_linears
from agentkv.model.model_shape import describe_model
from agentkv_kernels import native
from agentkv_kernels.int8_weights import Int8Products

LEVELS = native.available_levels()
SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16}


def fused(model: PreTrainedModel, level: str) -> bool:
    """Rounds a model's weights, takes its layers over and then the model; answers whether."""
    products = Int8Products(native.native_at(level))
    quantise_linears(model, products)
    return fuse_model(model, fuse_layers(model, products))


def forked_logits(run: HandForked) -> Tensor:
    """Logits of two branches, forked inside a block, on a pool of their own."""
    parent = run.create()
    heads = list(run.runner.run(run.batch((parent, range(3, 20)), heads=[4, 16])).heads)
    child = run.fork(parent, 14)
    step = run.batch((parent, [40]), (child, [50, 51]), heads=[0, 2])
    heads += run.runner.run(step).heads
    return torch.stack([head for head in heads if isinstance(head, Tensor)])


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("family", ["llama", "qwen2", "mistral"])
@pytest.mark.parametrize("tied", [True, False])
def test_the_short_way_computes_what_the_model_does(family: str, level: str, tied: bool) -> None:
    """Catches a last norm left out, logits of other rows, and a model that is never taken."""

    def logits(*, is_short: bool) -> Tensor:
        model = build_tiny_model(family, **SIZES, tie_word_embeddings=tied)
        run = HandForked(model, num_blocks=16)
        plain = model.forward
        assert fused(model, level)
        assert model.forward is not plain
        if not is_short:
            model.forward = plain
        return forked_logits(run)

    short, own = logits(is_short=True), logits(is_short=False)
    torch.testing.assert_close(short, own, rtol=0, atol=1e-2)


@pytest.mark.parametrize("level", LEVELS[:1])
def test_calls_that_are_not_ours_go_the_models_own_way(level: str) -> None:
    """Catches a short way that answers callers who want more than logits."""
    model = build_tiny_model("llama", **SIZES)
    describe_model(model)
    assert fused(model, level)
    model.set_attn_implementation("eager")
    output = model(torch.arange(3, 9)[None], use_cache=False, output_hidden_states=True)
    assert not isinstance(output, ShortOutput)
    assert len(output.hidden_states) > 1
    assert output.logits.shape[1] == 6


@pytest.mark.parametrize("level", LEVELS[:1])
def test_a_model_that_does_more_to_its_logits_is_not_taken(level: str) -> None:
    """Catches a decision by names alone: this one has Llama's parts and halves its logits."""
    model = build_tiny_model("llama", **SIZES)
    describe_model(model)
    plain = model.forward

    def halved(*arguments: Any, **options: Any) -> Any:
        output = plain(*arguments, **options)
        output.logits = output.logits / 2
        return output

    model.forward = halved
    assert not fused(model, level)
    assert model.forward is halved


@pytest.mark.parametrize("level", LEVELS[:1])
def test_a_model_with_a_layer_that_is_not_taken_keeps_its_own_way(level: str) -> None:
    """Catches a short way that passes over a layer it does not know."""
    model = build_tiny_model("llama", **SIZES, num_hidden_layers=3)
    describe_model(model)
    products = Int8Products(native.native_at(level))
    quantise_linears(model, products)
    assert not fuse_model(model, fuse_layers(model, products)[:2])
