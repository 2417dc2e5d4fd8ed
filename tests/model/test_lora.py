"""Adapters beside linear layers equal the adapter merged into the weights; others are refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_adapters import ALPHA, RANK, merge, save_adapter
from tiny_models import build_tiny_model
from torch import Tensor
from transformers import PreTrainedModel

from agentkv.core.batch import AdapterRows
from agentkv.errors import InvalidRequest, UnsupportedModelError
from agentkv.model.adapter_files import read_adapter
from agentkv.model.attention import use_agentkv_attention
from agentkv.model.fused_layer import fuse_layers
from agentkv.model.golden_check import check_model
from agentkv.model.int8_linear import Int8Linear, quantise_linears
from agentkv.model.lora import AdapterStep, LoraLinear, install_adapters
from agentkv.model.model_shape import describe_model
from agentkv.model.sampler import Sampler
from agentkv_kernels.int8_weights import Int8Products
from agentkv_kernels.native import load_native

TOLERANCE = 1e-4
FAMILIES = ["llama", "qwen2", "gemma3", "phi3", "gpt_neox", "opt", "olmo2", "cohere2"]
TARGETS = {
    "phi3": ("qkv_proj", "o_proj", "gate_up_proj", "down_proj"),
    "gpt_neox": ("query_key_value", "dense", "dense_h_to_4h"),
    "opt": ("q_proj", "v_proj", "out_proj", "fc1", "fc2"),
}


def logits(model: PreTrainedModel, step: AdapterStep, *groups: AdapterRows) -> Tensor:
    """Logits of 12 tokens in one sequence, by the model's own attention."""
    model.set_attn_implementation("eager")
    ids = torch.arange(5, 17)[None]
    step.begin(groups, 12)
    with torch.inference_mode():
        answer: Tensor = model(ids, use_cache=False).logits[0]
    step.begin((), 0)
    return answer


def install(model: PreTrainedModel, *folders: Path) -> AdapterStep:
    return install_adapters(model, [read_adapter(path.name, path) for path in folders])


@pytest.mark.parametrize("family", FAMILIES)
def test_an_adapter_equals_the_merged_model(family: str, tmp_path: Path) -> None:
    """Catches a wrong scale or side, a module that is passed over, and a check that would not."""
    model = build_tiny_model(family)
    targets: dict[str, Any] = {"targets": TARGETS[family]} if family in TARGETS else {}
    folder = save_adapter(tmp_path / "a", model, seed=1, **targets)
    plain = logits(build_tiny_model(family), AdapterStep())
    step = install(model, folder)
    changed = logits(model, step, AdapterRows("a", 0, 12))
    merged = logits(merge(build_tiny_model(family), folder), AdapterStep())
    torch.testing.assert_close(changed, merged, rtol=0, atol=TOLERANCE)
    assert (changed - plain).abs().max() > 100 * TOLERANCE
    assert torch.equal(logits(model, step), plain), "rows without adapter are the model's own"
    shape = describe_model(model)
    for name in ("", "a"):
        report = check_model(model, shape, Sampler(), block_size=4, adapters=step, adapter=name)
        assert report.error < 1e-5


def test_scales_follow_the_config(tmp_path: Path) -> None:
    """Catches rsLoRA taken for LoRA, and patterns of rank and alpha that are passed over."""
    model = build_tiny_model("llama")
    config: dict[str, Any] = {
        "use_rslora": True,
        "rank_pattern": {"v_proj": 2},
        "alpha_pattern": {"layers.1.self_attn.q_proj": 10.0},
    }
    folder = save_adapter(tmp_path / "a", model, seed=1, **config)
    weights = read_adapter("a", folder)
    plain = read_adapter(
        "b", save_adapter(tmp_path / "b", model, seed=1, rank_pattern={"v_proj": 2})
    )
    expected = {"q_proj": ALPHA / RANK**0.5, "v_proj": ALPHA / 2**0.5}
    for name, factor in expected.items():
        part = f"model.layers.0.self_attn.{name}"
        unscaled = plain.parts[part].up / (ALPHA / plain.parts[part].up.shape[1])
        torch.testing.assert_close(weights.parts[part].up, unscaled * factor)
    last = "model.layers.1.self_attn.q_proj"
    torch.testing.assert_close(
        weights.parts[last].up, plain.parts[last].up / (ALPHA / RANK) * (10.0 / RANK**0.5)
    )


def test_rows_of_several_adapters_share_a_step(tmp_path: Path) -> None:
    """Catches groups that reach a row too far, and an adapter that touches rows without one."""
    model = build_tiny_model("llama")
    folders = [save_adapter(tmp_path / name, model, seed=seed) for seed, name in enumerate("ab")]
    step = install(model, *folders)
    layer = model.get_submodule("model.layers.0.self_attn.q_proj")
    assert isinstance(layer, LoraLinear)
    rows = torch.randn(1, 9, 32)
    step.begin((AdapterRows("a", 2, 3), AdapterRows("b", 5, 2)), 9)
    with torch.inference_mode():
        mixed, base = layer(rows)[0], layer.base(rows)[0]
    owners = ["", "", "a", "a", "a", "b", "b", "", ""]
    for number, owner in enumerate(owners):
        expected = base[number]
        if owner:
            part = layer.parts[owner]
            expected = expected + rows[0, number] @ part.down.T @ part.up.T
        torch.testing.assert_close(mixed[number], expected, rtol=0, atol=1e-5)
        assert owner or torch.equal(mixed[number], base[number])
    step.begin((AdapterRows("a", 0, 4),), 8)
    with pytest.raises(UnsupportedModelError, match="computes 9 of 8 rows"):
        layer(rows)


def test_adapters_stand_beside_8_bit_weights(tmp_path: Path) -> None:
    """Catches a short way through a layer that leaves its adapters out, and an adapter rounded."""
    sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16}
    model = build_tiny_model("llama", **sizes)
    folder = save_adapter(tmp_path / "a", model, seed=1, targets=("q_proj", "down_proj"))
    step = install(model, folder)
    shape = describe_model(model)
    products = Int8Products(load_native())
    assert quantise_linears(model, products) > 0
    assert fuse_layers(model, products) == [], "layers with adapters keep their own way"
    layer = model.get_submodule("model.layers.0.self_attn.q_proj")
    assert isinstance(layer, LoraLinear)
    assert isinstance(layer.base, Int8Linear)
    merged = logits(merge(build_tiny_model("llama", **sizes), folder), AdapterStep())
    ours = logits(model, step, AdapterRows("a", 0, 12))
    assert (ours - merged).abs().max() < 0.1 * (merged.max() - merged.min())
    use_agentkv_attention(model)
    report = check_model(
        model, shape, Sampler(), block_size=4, weights="int8", adapters=step, adapter="a"
    )
    assert report.error < report.tolerance


NO_TENSOR = torch.zeros(2, 2)
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "dora": ({"use_dora": True}, "use_dora True"),
    "bias": ({"bias": "all"}, "bias 'all'"),
    "modules": ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
    "type": ({"peft_type": "IA3"}, "'IA3'; only LORA"),
    "start": ({"init_lora_weights": "pissa"}, "init_lora_weights 'pissa'"),
    "future": ({"use_something_new": 3}, "use_something_new 3"),
    "embedding": (
        {"tensors": {"base_model.model.model.embed_tokens.lora_embedding_A": NO_TENSOR}},
        "lora_embedding_A, which is no low-rank matrix",
    ),
    "head": ({"targets": ("lm_head",)}, "only linear layers before the head"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_would_be_left_out_is_refused(what: str, tmp_path: Path) -> None:
    """Catches an adapter that is served without a part of it: silently another model."""
    changes, says = REFUSED[what]
    model = build_tiny_model("llama")
    folder = save_adapter(tmp_path / "a", model, seed=1, **changes)
    with pytest.raises(UnsupportedModelError, match=says):
        install(model, folder)
    assert not any(isinstance(module, LoraLinear) for module in model.modules())


def test_an_adapter_of_another_model_is_refused(tmp_path: Path) -> None:
    """Catches matrices that fit by chance of one dimension, and names that lead nowhere."""
    wide = save_adapter(tmp_path / "w", build_tiny_model("llama", hidden_size=64), seed=1)
    with pytest.raises(UnsupportedModelError, match=r"down_proj is \(32, 64\), not \(64, 64\)"):
        install(build_tiny_model("llama"), wide)
    opt = save_adapter(tmp_path / "o", build_tiny_model("opt"), seed=1, targets=("fc1",))
    with pytest.raises(UnsupportedModelError, match="fc1, which LlamaForCausalLM lacks"):
        install(build_tiny_model("llama"), opt)


@pytest.mark.parametrize("damage", ["no folder", "no weights", "torn config", "no pair", "rank"])
def test_a_damaged_folder_is_the_callers_error(damage: str, tmp_path: Path) -> None:
    """Catches a stack trace of the reader for half a download."""
    model = build_tiny_model("llama")
    more = {"base_model.model.lm_head.lora_A.weight": NO_TENSOR} if damage == "no pair" else None
    rank: dict[str, Any] = {"r": 5} if damage == "rank" else {}
    folder = save_adapter(tmp_path / "a", model, seed=1, tensors=more, **rank)
    if damage == "no folder":
        folder = tmp_path / "nowhere"
    elif damage == "no weights":
        (folder / "adapter_model.safetensors").unlink()
    elif damage == "torn config":
        (folder / "adapter_config.json").write_text(json.dumps({"r": 4})[:-1])
    with pytest.raises(InvalidRequest):
        read_adapter("a", folder)
