"""The check at load: passes what is right, refuses what is silently wrong, says why."""

from typing import Any

import pytest
import torch
from tiny_models import PROVEN_FAMILIES, WINDOW, build_tiny_model
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from agentkv.errors import UnsupportedModelError
from agentkv.model.attention import ATTENTION_NAME, use_agentkv_attention
from agentkv.model.golden_check import GoldenReport, check_model
from agentkv.model.kv_cache import KV_DTYPES
from agentkv.model.model_shape import LayerShape, ModelShape, describe_model
from agentkv.model.sampler import Sampler
from agentkv_kernels.implementation import Implementation


def check(model: PreTrainedModel, block_size: int = 16) -> GoldenReport:
    return check_model(model, describe_model(model), Sampler(), block_size=block_size)


@pytest.mark.parametrize("family", ["llama", "gemma2", "gemma3n", "gpt2", "gpt_oss"])
@pytest.mark.parametrize("block_size", [1, 2, 4, 16])
def test_right_models_pass(family: str, block_size: int) -> None:
    """Catches a check that refuses good models, at any block size a pool may have."""
    report = check(build_tiny_model(family), block_size)
    assert report.error < 1e-4
    assert report.num_rows == 10


@pytest.mark.parametrize("family", PROVEN_FAMILIES)
def test_every_proven_architecture_passes(family: str) -> None:
    """Catches an architecture that is called proven and would be refused at load."""
    assert check(build_tiny_model(family), block_size=4).error < 1e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_passes_within_a_wider_tolerance(dtype: torch.dtype) -> None:
    """Catches rounding taken for a fault."""
    report = check(build_tiny_model("llama", dtype=dtype))
    assert 0 < report.error < report.tolerance


@pytest.mark.parametrize("implementation", ["cpu", "torch"])
@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_8_bit_kv_passes_within_a_wider_tolerance(
    kv_dtype: str, implementation: Implementation
) -> None:
    """Catches factors that are stored, copied on write or read for another token."""
    model = build_tiny_model("llama")
    report = check_model(
        model,
        describe_model(model),
        Sampler(),
        block_size=4,
        implementation=implementation,
        kv_dtype=KV_DTYPES[kv_dtype],
    )
    assert 1e-4 < report.error < report.tolerance


def test_the_model_is_left_on_our_attention() -> None:
    """Catches a check that leaves the model on eager attention: it would then read no pool."""
    model = build_tiny_model("llama")
    check(model)
    assert model.config._attn_implementation == ATTENTION_NAME


def test_llama4_is_caught_by_its_numbers_alone() -> None:
    """Catches a check too weak for the fault it exists for.

    Llama 4 attends in chunks that only its mask knows of. The loader refuses it by name; here the
    name is not looked at.
    """
    model = build_tiny_model("llama4")
    use_agentkv_attention(model)
    shape = ModelShape(
        architecture="Llama4ForCausalLM",
        layers=(LayerShape(2, 8, 0, None), LayerShape(2, 8, 1, None)),
        dtype=torch.float32,
        device=model.device,
        vocab_size=97,
    )
    with pytest.raises(UnsupportedModelError, match=r"Llama4ForCausalLM differs .* use another"):
        check_model(model, shape, Sampler(), block_size=16)


@pytest.mark.parametrize(
    ("family", "argument"),
    [("mistral", "sliding_window"), ("gemma2", "softcap"), ("gpt_oss", "s_aux")],
)
def test_an_attention_feature_that_gets_lost_is_caught(
    family: str, argument: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a check whose tokens are too few, or too alike, to show a lost feature."""
    model = build_tiny_model(family)
    shape = describe_model(model)
    ours = ALL_ATTENTION_FUNCTIONS[ATTENTION_NAME]

    def losing(*args: Any, **given: Any) -> Any:
        given.pop(argument, None)
        return ours(*args, **given)

    monkeypatch.setattr("agentkv.model.attention._attention", losing)
    use_agentkv_attention(model)
    with pytest.raises(UnsupportedModelError, match="differs from its own attention"):
        check_model(model, shape, Sampler(), block_size=16)
    monkeypatch.undo()
    use_agentkv_attention(model)
    assert check_model(model, shape, Sampler(), block_size=16).error < 1e-4


def test_numbers_that_are_not_finite_fail() -> None:
    """Catches NaN passing because no comparison with it is true."""
    model = build_tiny_model("llama")
    shape = describe_model(model)
    with torch.no_grad():
        next(model.parameters()).fill_(float("nan"))
    with pytest.raises(UnsupportedModelError, match="nan"):
        check_model(model, shape, Sampler(), block_size=16)


def test_far_windows_do_not_make_the_check_long() -> None:
    """Catches a prefix as long as a window of thousands of tokens."""
    near = build_tiny_model("mistral", sliding_window=3 * WINDOW)
    far = build_tiny_model("mistral", sliding_window=4096)
    assert check(near).error < 1e-4
    assert check(far).error < 1e-4
