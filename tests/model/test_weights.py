"""Rounded weights in whole models: which layers are taken, what they compute, who is left alone."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hand_forked import HandForked
from tiny_models import build_tiny_model
from torch import Tensor
from transformers import PreTrainedModel

from agentkv.errors import InvalidRequest
from agentkv.model.fused_layer import fuse_layers
from agentkv.model.golden_check import check_model
from agentkv.model.int8_linear import Int8Embedding, Int8Linear, quantise_linears
from agentkv.model.model_shape import describe_model
from agentkv.model.paged_step import NativeView, PagedStep
from agentkv.model.sampler import Sampler
from agentkv.model.weights import choose_weights, convert_weights
from agentkv_kernels import native
from agentkv_kernels.int8_weights import Int8Products

LEVELS = [None, *native.available_levels()]
SIZES = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16}
SERVED = [
    "llama",
    "qwen2",
    "qwen3",
    "mistral",
    "gemma2",
    "gemma3",
    "gpt2",
    "gpt_oss",
    "gpt_neox",
    "opt",
]
FUSED = ["llama", "qwen2", "mistral"]


def library(level: str | None) -> native.NativeLibrary | None:
    return None if level is None else native.native_at(level)


def tiny(family: str, **changes: Any) -> PreTrainedModel:
    sizes: dict[str, Any] = SIZES if family in (*FUSED, "qwen3", "gemma2", "gemma3") else {}
    return build_tiny_model(family, **{**sizes, **changes})


def own_logits(model: PreTrainedModel) -> Tensor:
    """Logits of a few tokens by the model's own attention, (16, vocab_size)."""
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    with torch.inference_mode():
        logits: Tensor = model(torch.arange(3, 19)[None], use_cache=False).logits[0]
    model.set_attn_implementation(before)
    return logits


@pytest.mark.parametrize("family", SERVED)
@pytest.mark.parametrize("kind", ["int8", "bf16"])
def test_every_family_is_served_with_rounded_weights(family: str, kind: str) -> None:
    """Catches a layer that needs its weight as a tensor, and a wrong short way through a layer."""
    model = tiny(family)
    shape = describe_model(model)
    exact = own_logits(model)
    convert_weights(model, "int8" if kind == "int8" else "bf16", native.load_native())
    check_model(model, shape, Sampler(), block_size=4, weights=kind)
    spread = exact.max() - exact.min()
    assert float((own_logits(model) - exact).abs().max() / spread) < 0.15


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("family", FUSED)
def test_layers_like_llamas_are_computed_by_two_calls(family: str, level: str | None) -> None:
    """Catches a fused layer that forgets a bias, a window or a residual, and one never taken."""
    model = tiny(family)
    shape = describe_model(model)
    weights = convert_weights(model, "int8", library(level))
    assert weights.num_fused_layers == (2 if level else 0)
    check_model(model, shape, Sampler(), block_size=4, weights="int8")


@pytest.mark.parametrize("level", LEVELS[1:])
def test_one_call_for_all_layers_computes_what_each_does(
    level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a layer that is skipped or reads another one's KV, and a stretch never run."""

    def logits(*, is_whole: bool) -> Tensor:
        model = tiny("llama", num_hidden_layers=4)
        run = HandForked(model, num_blocks=16)
        convert_weights(model, "int8", library(level))
        whole = []
        native_view = PagedStep.native_view

        def view(step: PagedStep, layers: Sequence[int]) -> NativeView | None:
            whole.append(tuple(layers))
            return native_view(step, layers) if is_whole else None

        monkeypatch.setattr(PagedStep, "native_view", view)
        parent = run.create()
        heads = list(run.runner.run(run.batch((parent, range(3, 20)), heads=[4, 16])).heads)
        child = run.fork(parent, 14)
        step = run.batch((parent, [40]), (child, [50, 51]), heads=range(3))
        heads += run.runner.run(step).heads
        monkeypatch.undo()
        assert whole == [(0, 1, 2, 3)] * 2
        return torch.stack([head for head in heads if isinstance(head, Tensor)])

    whole, single = logits(is_whole=True), logits(is_whole=False)
    # Layer by layer, attention is of the level that this processor runs best.
    is_exact = level == LEVELS[1]
    torch.testing.assert_close(whole, single, rtol=0, atol=0 if is_exact else 1e-2)


@pytest.mark.parametrize("family", ["qwen3", "gemma2", "gemma3", "gpt2"])
def test_other_layers_keep_their_own_way(family: str) -> None:
    """Catches a norm of queries, or a second pair of norms, that the short way would leave out."""
    model = tiny(family)
    describe_model(model)
    products = Int8Products(native.load_native())
    quantise_linears(model, products)
    assert fuse_layers(model, products) == []


def test_a_layer_that_computes_something_else_is_not_taken() -> None:
    """Catches a decision by names alone: this layer has Llama's parts and another activation."""
    model = tiny("llama", hidden_act="gelu")
    describe_model(model)
    products = Int8Products(native.load_native())
    quantise_linears(model, products)
    assert fuse_layers(model, products) == []


def test_a_tied_head_is_rounded_once() -> None:
    """Catches a second copy of the largest weight, and a head that still reads the old one."""
    model = tiny("llama", tie_word_embeddings=True)
    describe_model(model)
    before = sum(weight.nbytes for weight in model.parameters())
    weights = convert_weights(model, "int8", native.load_native())
    untyped: Any = model
    embedding, head = untyped.get_input_embeddings(), untyped.get_output_embeddings()
    assert isinstance(embedding, Int8Embedding)
    assert isinstance(head, Int8Linear)
    assert embedding.weights.panels.data_ptr() == head.weights.panels.data_ptr()
    assert weights.num_bytes < before * 0.35  # 97 outputs fill 4 panels of 32


def test_small_models_and_other_dtypes_stay_as_they_are() -> None:
    """Catches an automatic choice whose quality nobody measured."""
    model = tiny("llama")
    found = native.load_native()
    assert choose_weights("auto", model, found) is None
    assert choose_weights("fp32", model, found) is None
    assert choose_weights("int8", model, found) == "int8"
    half = tiny("llama").bfloat16()
    assert choose_weights("auto", half, found) is None
    with pytest.raises(InvalidRequest, match="float32 on a CPU"):
        choose_weights("int8", half, found)
