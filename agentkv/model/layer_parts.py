"""What a decoder layer with 8-bit weights consists of, if it looks like one of Llama's.

It reads names, types and shapes; that such a layer also computes what Llama's does, it cannot know.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from agentkv.model.int8_linear import Int8Linear
from agentkv_kernels.int8_layers import LayerParts
from agentkv_kernels.int8_weights import Int8Weights, Norm

_LAYER = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
_ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
_MLP = {"gate_proj", "up_proj", "down_proj", "act_fn"}


def parts_of(layer: Any) -> LayerParts | None:
    """Finds the parts of a layer that looks like Llama's; None for any other module."""
    if _children(layer) != _LAYER:
        return None
    attention, mlp = layer.self_attn, layer.mlp
    if _children(attention) != _ATTENTION or _children(mlp) != _MLP:
        return None
    first, second = norm_of(layer.input_layernorm), norm_of(layer.post_attention_layernorm)
    inputs = _packed(attention.q_proj, attention.k_proj, attention.v_proj)
    gates = _packed(mlp.gate_proj, mlp.up_proj)
    outputs = _packed(attention.o_proj), _packed(mlp.down_proj)
    head_dim = getattr(attention, "head_dim", 0)
    if not (first and second and inputs and gates and outputs[0] and outputs[1] and head_dim):
        return None
    if gates.bias is not None or outputs[1].bias is not None:
        return None
    return LayerParts(
        head_dim=head_dim,
        num_heads=attention.q_proj.out_features // head_dim,
        num_kv_heads=attention.k_proj.out_features // head_dim,
        first_norm=first,
        inputs=inputs.weights,
        input_bias=inputs.bias,
        output=outputs[0].weights,
        output_bias=outputs[0].bias,
        second_norm=second,
        gates_ups=gates.weights,
        down=outputs[1].weights,
    )


class _Packed(NamedTuple):
    """Projections of one input, in one piece."""

    weights: Int8Weights
    bias: Tensor | None


def _packed(*linears: nn.Module) -> _Packed | None:
    """Finds what some projections are packed into; None where they are not, or not alone."""
    members = [linear for linear in linears if isinstance(linear, Int8Linear)]
    biases = [member.bias.detach() for member in members if member.bias is not None]
    group = members[0].group if members else None
    if group is None or len(members) < len(linears) or len(biases) not in (0, len(members)):
        return None
    if any(member.group is not group for member in members):
        return None
    return _Packed(group, torch.cat(biases) if biases else None)


def norm_of(norm: Any) -> Norm | None:
    """Reads an RMS norm; how it uses its weight is seen when the layer is tried."""
    epsilon = getattr(norm, "variance_epsilon", None)
    weight = getattr(norm, "weight", None)
    if not isinstance(epsilon, float) or not isinstance(weight, nn.Parameter):
        return None
    return Norm(weight.detach(), epsilon) if weight.dtype == torch.float32 else None


def _children(module: nn.Module) -> set[str]:
    return {name for name, _ in module.named_children()}
