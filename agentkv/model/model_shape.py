"""What the KV pool and the runner must know of a model: asked of the model itself, not its config.

Configurations name their fields differently in every family, and some layers differ from what the
fields say. So one token is run through the model with an attention function that only writes down
what it is given. This file knows no blocks.
"""

import inspect
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from agentkv.errors import UnsupportedModelError
from agentkv.model.attention import (
    LayerCall,
    Witness,
    check_called_once,
    forward,
    use_agentkv_attention,
)
from agentkv.model.support import check_supported


class LayerShape(NamedTuple):
    """KV of one layer."""

    num_kv_heads: int
    head_dim: int
    donor: int
    """Layer whose KV this one reads: itself, or an earlier one (KV sharing)."""
    window: int | None
    """Positions a row reads, itself included; None reads all."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """One model, as its attention calls describe it."""

    architecture: str
    """The model's class, for messages."""
    layers: tuple[LayerShape, ...]
    dtype: torch.dtype
    """Of keys and values."""
    device: torch.device
    vocab_size: int
    """Width of the logits."""

    @property
    def num_layers(self) -> int:
        """Layers that attend."""
        return len(self.layers)

    @property
    def windows(self) -> tuple[int, ...]:
        """Distinct sliding windows, ascending."""
        return tuple(sorted({layer.window for layer in self.layers if layer.window is not None}))

    def bytes_per_block(self, block_size: int, kv_dtype: torch.dtype | None = None) -> int:
        """Counts the bytes of K and V that one block takes, all layers together.

        Args:
            block_size: Token positions per block.
            kv_dtype: What the pool stores; None is the model's own. An 8-bit one adds a float32
                factor for each token and head.
        """
        dtype = kv_dtype or self.dtype
        factor = 4 if dtype.itemsize == 1 else 0
        return sum(
            2 * block_size * layer.num_kv_heads * (layer.head_dim * dtype.itemsize + factor)
            for index, layer in enumerate(self.layers)
            if layer.donor == index
        )


def describe_model(model: PreTrainedModel) -> ModelShape:
    """Runs one token through the model and writes down what each layer's attention is given.

    The model computes its attention through `agentkv.model.attention` from here on.

    Args:
        model: Any Hugging Face model that predicts the next token, in evaluation mode.

    Raises:
        UnsupportedModelError: The family is known to come out wrong, or works in a way that is
            not understood; names what.
    """
    check_supported(model.config)
    _check_head(model)
    use_agentkv_attention(model)
    witness = Witness(_zeros)
    zero = torch.zeros(1, dtype=torch.int64, device=model.device)
    with torch.inference_mode():
        logits = forward(model, witness, zero, zero, zero)
    layers = [call.layer for call in witness.calls]
    check_called_once(model, layers, _num_layers(model))
    calls = sorted(witness.calls, key=lambda call: call.layer)
    return ModelShape(
        architecture=type(model).__name__,
        layers=tuple(_layer_shape(model, call, calls) for call in calls),
        dtype=calls[0].key.dtype,
        device=calls[0].key.device,
        vocab_size=logits.shape[-1],
    )


def _zeros(call: LayerCall) -> Tensor:
    num_rows, num_heads, _ = call.query.shape
    return call.query.new_zeros(num_rows, num_heads, call.value.shape[-1])


def _num_layers(model: PreTrainedModel) -> int:
    return int(model.config.get_text_config().num_hidden_layers)


def _layer_shape(model: PreTrainedModel, call: LayerCall, calls: list[LayerCall]) -> LayerShape:
    if call.key.shape != call.value.shape:
        raise UnsupportedModelError(
            f"{type(model).__name__}, layer {call.layer}: keys have {call.key.shape[-1]} "
            f"dimensions and values {call.value.shape[-1]}; the KV pool holds none that are wider."
        )
    donor = next(other.layer for other in calls if other.key.data_ptr() == call.key.data_ptr())
    _, num_kv_heads, head_dim = call.key.shape
    return LayerShape(num_kv_heads, head_dim, donor, call.window)


def _check_head(model: PreTrainedModel) -> None:
    """Raises for a model that has no logits of chosen rows.

    Raises:
        UnsupportedModelError: Names the class.
    """
    if "logits_to_keep" not in inspect.signature(model.forward).parameters:
        raise UnsupportedModelError(
            f"{type(model).__name__} cannot compute the logits of chosen rows (no logits_to_keep): "
            "load it as a causal language model."
        )
