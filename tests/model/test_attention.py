"""The hook: what models hand over arrives, what is not understood is refused by name."""

from typing import Any

import pytest
import torch
from tiny_models import WINDOW, build_tiny_model
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from agentkv.errors import UnsupportedModelError
from agentkv.model.attention import (
    ATTENTION_NAME,
    LayerCall,
    check_called_once,
    forward,
    use_agentkv_attention,
)


class Recorder:
    """Attention that answers zeros and keeps the calls."""

    def __init__(self) -> None:
        self.calls: list[LayerCall] = []

    def attend(self, call: LayerCall) -> Tensor:
        self.calls.append(call)
        return torch.zeros(*call.query.shape[:2], call.value.shape[2])


class Layer(nn.Module):
    """As much of an attention module as the hook looks at."""

    def __init__(self, layer_idx: int | None = 3, *, is_causal: bool = True) -> None:
        super().__init__()
        self.layer_idx = layer_idx
        self.is_causal = is_causal


def record(model: PreTrainedModel) -> list[LayerCall]:
    use_agentkv_attention(model)
    recorder = Recorder()
    with torch.inference_mode():
        ids = torch.tensor([5, 6, 7])
        forward(model, recorder, ids, torch.arange(3), torch.tensor([2]))
    return recorder.calls


def call_hook(layer: nn.Module | None = None, mask: Tensor | None = None, **given: Any) -> Any:
    use_agentkv_attention(build_tiny_model("llama"))
    query, key = torch.randn(1, 4, 5, 8), torch.randn(1, 2, 5, 8)
    hook = ALL_ATTENTION_FUNCTIONS[ATTENTION_NAME]
    recorder = Recorder()
    hook(layer or Layer(), query, key, key, mask, agentkv_step=recorder, **given)
    (call,) = recorder.calls
    assert torch.equal(call.query, query[0].transpose(0, 1))
    assert torch.equal(call.key, key[0].transpose(0, 1))
    return call


def test_every_layer_calls_once_with_rows_first() -> None:
    """Catches a layer that is skipped, and heads mistaken for rows."""
    calls = record(build_tiny_model("llama"))
    assert [call.layer for call in calls] == [0, 1]
    assert all(call.query.shape == (3, 4, 8) for call in calls)
    assert all(call.key.shape == call.value.shape == (3, 2, 8) for call in calls)


def test_window_and_softcap_are_each_layers_own() -> None:
    """Catches a window taken from the configuration instead of the layer."""
    calls = record(build_tiny_model("gemma2"))
    assert [call.window for call in calls] == [WINDOW, None]
    assert [call.softcap for call in calls] == [5.0, 5.0]


def test_scale_is_the_models_own() -> None:
    """Catches head_dim ** -0.5 used for a model that scales its scores otherwise."""
    calls = record(build_tiny_model("gemma2", query_pre_attn_scalar=64))
    assert [call.scale for call in calls] == [0.125, 0.125]
    assert call_hook().scale == pytest.approx(8**-0.5)  # none given: the usual one


def test_sinks_arrive() -> None:
    """Catches sinks dropped on the way: the softmax would lack them, silently."""
    model = build_tiny_model("gpt_oss")
    expected = [weight for name, weight in model.named_parameters() if name.endswith("sinks")]
    for call, sinks in zip(record(model), expected, strict=True):
        assert call.sinks is not None
        assert torch.equal(call.sinks, sinks)


@pytest.mark.parametrize("name", ["position_bias", "head_mask", "something_new"])
def test_unknown_arguments_are_refused_by_name(name: str) -> None:
    """Catches an argument that changes attention and is swallowed."""
    with pytest.raises(UnsupportedModelError, match=name):
        call_hook(None, None, **{name: torch.zeros(1)})
    call_hook(None, None, **{name: None})


def test_arguments_without_effect_pass() -> None:
    """Catches a hook so strict that no model gets through."""
    call_hook(position_ids=torch.zeros(1, 5), use_cache=False, output_router_logits=False)


def test_a_mask_dropout_or_two_way_attention_is_refused() -> None:
    """Catches what would be left out of the result although it has a name of its own."""
    with pytest.raises(UnsupportedModelError, match="attention_mask"):
        call_hook(mask=torch.zeros(1, 1, 5, 5))
    with pytest.raises(UnsupportedModelError, match="dropout"):
        call_hook(dropout=0.1)
    with pytest.raises(UnsupportedModelError, match="is_causal"):
        call_hook(Layer(is_causal=False))


def test_a_layer_without_number_is_refused() -> None:
    """Catches KV of every layer written to one place."""
    with pytest.raises(UnsupportedModelError, match="layer_idx"):
        call_hook(Layer(None))


@pytest.mark.parametrize("layers", [[0], [0, 0], [0, 1, 1], [0, 2]])
def test_layers_that_do_not_call_exactly_once_are_refused(layers: list[int]) -> None:
    """Catches a hybrid model some of whose layers never attend."""
    model = build_tiny_model("llama")
    with pytest.raises(UnsupportedModelError, match="exactly once"):
        check_called_once(model, layers, 2)
    check_called_once(model, [1, 0], 2)


def test_a_family_that_bypasses_the_interface_is_refused() -> None:
    """Catches Falcon, where the library only warns and goes on with its own attention."""
    with pytest.raises(UnsupportedModelError, match="FalconForCausalLM"):
        use_agentkv_attention(build_tiny_model("falcon"))
