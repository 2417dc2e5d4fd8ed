"""What a model's weights are kept as while it serves: as loaded, or smaller.

Owns the choice and the change, in place. On a CPU a step of decoding reads every weight once, so
fewer bytes are a faster step. It knows no engine; that the result is sound is the golden check's to
say.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, TypeGuard

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from agentkv.errors import InvalidRequest
from agentkv.model.fused_layer import fuse_layers
from agentkv.model.fused_model import fuse_model
from agentkv.model.int8_linear import quantise_linears
from agentkv_kernels.int8_weights import Int8Products
from agentkv_kernels.native import NativeLibrary

WeightKind = Literal["bf16", "int8"]
"""What weights can be made."""
WORTHWHILE = 32_000_000
"""Weights below which `auto` leaves a model alone: they stay in the processor's caches anyway, and
small models bear rounding worse."""


@dataclass(frozen=True, slots=True)
class ServedWeights:
    """What a model's weights are now."""

    kind: str
    """bf16, int8, or the dtype that they were loaded in."""
    num_bytes: int
    """Of all weights, shared ones counted once."""
    num_fused_layers: int = 0
    """Layers that are computed by two native calls."""


def choose_weights(
    wish: str, model: PreTrainedModel, native: NativeLibrary | None
) -> WeightKind | None:
    """Decides what the weights become.

    Args:
        wish: `auto`, `fp32`, `bf16` or `int8`.
        model: As loaded.
        native: The kernels of this machine, or None.

    Returns:
        A kind; None where the weights stay as they were loaded.

    Raises:
        InvalidRequest: Only weights loaded as float32 on a CPU can be changed.
    """
    is_plain = model.dtype == torch.float32 and model.device.type == "cpu"
    if wish == "auto":
        pays = native is not None and model.num_parameters() >= WORTHWHILE
        return "int8" if is_plain and pays else None
    if not is_plain and not (wish == "fp32" and model.dtype == torch.float32):
        raise InvalidRequest(
            f"weights {wish} are made of float32 on a CPU, not of {model.dtype} on {model.device}; "
            "leave weights at auto, or set the dtype to float32 and the device to cpu."
        )
    return "bf16" if wish == "bf16" else "int8" if wish == "int8" else None


def convert_weights(
    model: PreTrainedModel, kind: WeightKind | None, native: NativeLibrary | None
) -> ServedWeights:
    """Makes a model's weights what was chosen, in place, and lets the others go.

    Args:
        model: In evaluation mode, its attention AgentKV's.
        kind: Of `choose_weights`.
        native: The kernels, or None: torch then multiplies 8-bit weights, slowly.
    """
    packed, fused = 0, 0
    if kind == "int8":
        products = Int8Products(native)
        packed = quantise_linears(model, products)
        layers = fuse_layers(model, products)
        fuse_model(model, layers)
        fused = len(layers)
    elif kind == "bf16":
        _round_linears(model)
    if kind is not None:
        _let_go(model)
    rest = sum(weight.nbytes for weight in model.parameters())
    name = kind or str(model.dtype).removeprefix("torch.")
    return ServedWeights(name, packed + rest, fused)


def _let_go(model: nn.Module) -> None:
    """Copies what is part of a larger piece of memory: one norm would keep a whole file mapped."""
    for weight in model.parameters():
        if weight.untyped_storage().nbytes() > weight.nbytes:
            weight.data = weight.detach().clone()


class Bf16Linear(nn.Module):
    """A linear layer that multiplies in bfloat16, between layers that compute in float32."""

    def __init__(self, plain: nn.Linear, weight: nn.Parameter) -> None:
        """Takes the place of a plain layer; its bias is kept."""
        super().__init__()
        self.in_features, self.out_features = plain.in_features, plain.out_features
        self.weight, self.bias = weight, plain.bias
        self.train(plain.training)

    def forward(self, input: Tensor) -> Tensor:
        """Projects (..., in_features) to (..., out_features), float32."""
        product = nn.functional.linear(input.to(torch.bfloat16), self.weight).float()
        return product if self.bias is None else product + self.bias


class Bf16Embedding(nn.Module):
    """An embedding that reads the weights of the head it is tied to."""

    def __init__(self, weight: nn.Parameter) -> None:
        """Takes the weights of the head, (vocab_size, hidden_size)."""
        super().__init__()
        self.weight = weight

    def forward(self, input: Tensor) -> Tensor:
        """Returns the vectors of some tokens, (*input.shape, hidden_size) float32."""
        return nn.functional.embedding(input, self.weight).float()


def _round_linears(model: nn.Module) -> None:
    """Rounds the weights of every plain linear layer; tied ones once."""
    rounded: dict[int, nn.Parameter] = {}
    for parent, name, linear in list(_plain_children(model)):
        key = id(linear.weight)
        if key not in rounded:
            rounded[key] = nn.Parameter(linear.weight.detach().bfloat16(), requires_grad=False)
        setattr(parent, name, Bf16Linear(linear, rounded[key]))
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Embedding and id(child.weight) in rounded:
                setattr(parent, name, Bf16Embedding(rounded[id(child.weight)]))


def _plain_children(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Linear]]:
    for parent in model.modules():
        for name, child in parent.named_children():
            if _is_linear(child):
                yield parent, name, child


def _is_linear(module: nn.Module) -> TypeGuard[nn.Linear]:
    return type(module) is nn.Linear
