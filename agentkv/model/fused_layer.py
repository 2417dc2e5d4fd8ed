"""Decoder layers with 8-bit weights, computed by two native calls instead of some forty of torch.

    before attention   RMS norm, q, k and v, rotary embedding
    after attention    output projection, residual, RMS norm, gate and up, SiLU, down, residual

A layer is taken over when it has the parts of Llama's, and when, on random rows, it then gives
attention the same queries, keys and values and answers the same as the layer did: names alone say
too little. Others stay as they are. The layer's own forward remains, for passes that do not attend
through AgentKV, so that the golden check compares the two.
"""

import ctypes
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from agentkv.errors import UnsupportedModelError
from agentkv.model.attention import AttentionStep, LayerCall
from agentkv.model.int8_linear import Int8Linear
from agentkv_kernels.int8_weights import Int8Products, Int8Weights, scratch_bytes
from agentkv_kernels.native import NativeLibrary

_LAYER = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
_ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
_MLP = {"gate_proj", "up_proj", "down_proj", "act_fn"}
TOLERANCE = 1e-3
"""Relative difference, in the norm, of what a layer hands out. More than float32's: where a value
lies between two integers, its last bit decides which one it becomes."""
_TENSORS = ("query", "key", "value")
_P, _N, _F = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float


def fuse_layers(model: nn.Module, products: Int8Products) -> int:
    """Gives every layer that is understood its short way; answers how many.

    Args:
        model: In evaluation mode, with 8-bit weights, its attention AgentKV's.
        products: As its layers have; without native kernels nothing is done.
    """
    if products.native is None:
        return 0
    functions = _Functions(products.native)
    fused = 0
    for layer in list(model.modules()):
        parts = _parts_of(layer)
        if parts is not None:
            fused += _take_over(layer, FusedLayer(parts, functions, products))
    return fused


class _Functions:
    """The native functions of a layer."""

    def __init__(self, native: NativeLibrary) -> None:
        self.before = native.function(
            *("int8_before_attention", _P, _N, _N, _P, _F, _P, _P, _P, _P, _N, _N, _N, _P, _P, _N)
        )
        self.after = native.function(
            *("int8_after_attention", _P, _N, _N, _P, _N, _P, _P, _P, _F, _P, _P, _N, _P, _N)
        )


class _Norm(NamedTuple):
    weight: Tensor
    epsilon: float


class _Parts(NamedTuple):
    """What a layer consists of."""

    head_dim: int
    num_heads: int
    num_kv_heads: int
    first_norm: _Norm
    inputs: Int8Weights
    input_bias: Tensor | None
    output: Int8Weights
    output_bias: Tensor | None
    second_norm: _Norm
    gates_ups: Int8Weights
    down: Int8Weights


class FusedLayer:
    """One layer's short way."""

    def __init__(self, parts: _Parts, functions: _Functions, products: Int8Products) -> None:
        """Takes a layer's parts; `call` is set when the layer's own attention has shown it."""
        self.call: LayerCall | None = None
        """What the layer asks of attention, but for the tensors."""
        self.parts = parts
        self._functions = functions
        self._scratch = products.scratch

    def forward(
        self, hidden: Tensor, cosines: Tensor, sines: Tensor, step: AttentionStep
    ) -> Tensor:
        """Computes the layer.

        Args:
            hidden: (1, num_rows, hidden_size) float32, dense; not changed.
            cosines: (1, num_rows, head_dim) float32.
            sines: The same.
            step: Attends.

        Returns:
            (1, num_rows, hidden_size).
        """
        assert self.call is not None
        query, key, value = self._before(hidden, cosines, sines)
        attended = step.attend(self.call._replace(query=query, key=key, value=value))
        return self._after(hidden.clone(), attended.contiguous())

    def _before(self, hidden: Tensor, cosines: Tensor, sines: Tensor) -> tuple[Tensor, ...]:
        parts = self.parts
        _, num_rows, width = hidden.shape
        rotated, num_heads = parts.num_heads + parts.num_kv_heads, self._num_heads
        out = hidden.new_empty((num_rows, num_heads, parts.head_dim))
        self._functions.before(
            hidden.data_ptr(),
            num_rows,
            width,
            parts.first_norm.weight.data_ptr(),
            parts.first_norm.epsilon,
            parts.inputs.panels.data_ptr(),
            _address(parts.input_bias),
            cosines.data_ptr(),
            sines.data_ptr(),
            parts.head_dim,
            rotated,
            num_heads,
            out.data_ptr(),
            self._scratch.at_least(scratch_bytes(num_rows, width)),
            torch.get_num_threads(),
        )
        return out[:, : parts.num_heads], out[:, parts.num_heads : rotated], out[:, rotated:]

    def _after(self, hidden: Tensor, attended: Tensor) -> Tensor:
        parts = self.parts
        _, num_rows, width = hidden.shape
        inner = parts.down.num_inputs
        numbers = parts.output.num_inputs + width + 2 * inner
        self._functions.after(
            hidden.data_ptr(),
            num_rows,
            width,
            attended.data_ptr(),
            parts.output.num_inputs,
            parts.output.panels.data_ptr(),
            _address(parts.output_bias),
            parts.second_norm.weight.data_ptr(),
            parts.second_norm.epsilon,
            parts.gates_ups.panels.data_ptr(),
            parts.down.panels.data_ptr(),
            inner,
            self._scratch.at_least(scratch_bytes(num_rows, numbers)),
            torch.get_num_threads(),
        )
        return hidden

    @property
    def _num_heads(self) -> int:
        return self.parts.num_heads + 2 * self.parts.num_kv_heads


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _parts_of(layer: Any) -> _Parts | None:
    """Finds the parts of a layer that looks like Llama's; None for any other module."""
    if _children(layer) != _LAYER:
        return None
    attention, mlp = layer.self_attn, layer.mlp
    if _children(attention) != _ATTENTION or _children(mlp) != _MLP:
        return None
    first, second = _norm_of(layer.input_layernorm), _norm_of(layer.post_attention_layernorm)
    inputs = _packed(attention.q_proj, attention.k_proj, attention.v_proj)
    gates = _packed(mlp.gate_proj, mlp.up_proj)
    outputs = _packed(attention.o_proj), _packed(mlp.down_proj)
    head_dim = getattr(attention, "head_dim", 0)
    if not (first and second and inputs and gates and outputs[0] and outputs[1] and head_dim):
        return None
    if gates.bias is not None or outputs[1].bias is not None:
        return None
    return _Parts(
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


def _norm_of(norm: Any) -> _Norm | None:
    """Reads an RMS norm; how it uses its weight is seen when the layer is tried."""
    epsilon = getattr(norm, "variance_epsilon", None)
    weight = getattr(norm, "weight", None)
    if not isinstance(epsilon, float) or not isinstance(weight, nn.Parameter):
        return None
    return _Norm(weight.detach(), epsilon) if weight.dtype == torch.float32 else None


def _children(module: nn.Module) -> set[str]:
    return {name for name, _ in module.named_children()}


class _Recorder:
    """Attention that writes down what it is asked, and answers random numbers."""

    def __init__(self, answer: Tensor) -> None:
        self.calls: list[LayerCall] = []
        self._answer = answer

    def attend(self, call: LayerCall) -> Tensor:
        self.calls.append(call)
        return self._answer


def _take_over(layer: Any, fused: FusedLayer) -> bool:
    """Compares the short way with a layer's own on a few rows; the layer takes it if they agree."""
    plain = layer.forward
    trial = _Trial.of(fused.parts)
    own, ours = _Recorder(trial.attended), _Recorder(trial.attended)
    try:
        expected = plain(
            trial.hidden,
            attention_mask=None,
            position_embeddings=(trial.cosines, trial.sines),
            agentkv_step=own,
        )
    except (TypeError, ValueError, UnsupportedModelError):  # it needs something else as well
        return False
    if len(own.calls) != 1 or not isinstance(expected, Tensor):
        return False
    fused.call = own.calls[0]
    found = fused.forward(trial.hidden, trial.cosines, trial.sines, ours)
    pairs = [(found, expected)]
    pairs += [(getattr(ours.calls[0], name), getattr(fused.call, name)) for name in _TENSORS]
    if not all(_agree(*pair) for pair in pairs):
        return False

    def forward(
        hidden_states: Tensor,
        *arguments: Any,
        agentkv_step: AttentionStep | None = None,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        **options: Any,
    ) -> Tensor:
        if agentkv_step is not None and position_embeddings is not None and not arguments:
            return fused.forward(hidden_states, *position_embeddings, agentkv_step)
        if agentkv_step is not None:
            options["agentkv_step"] = agentkv_step
        answer: Tensor = plain(
            hidden_states, *arguments, position_embeddings=position_embeddings, **options
        )
        return answer

    layer.forward = forward
    return True


class _Trial(NamedTuple):
    """Rows on which a layer is tried."""

    hidden: Tensor
    cosines: Tensor
    sines: Tensor
    attended: Tensor

    @classmethod
    def of(cls, parts: _Parts) -> "_Trial":
        generator = torch.Generator().manual_seed(0)
        num_rows, half = 3, parts.head_dim // 2
        angles = torch.rand((1, num_rows, half), generator=generator) * 6
        angles = torch.cat((angles, angles), dim=-1)
        attended = torch.randn((num_rows, parts.num_heads, parts.head_dim), generator=generator)
        hidden = torch.randn((1, num_rows, parts.inputs.num_inputs), generator=generator)
        return cls(hidden, angles.cos(), angles.sin(), attended)


def _agree(found: Tensor, expected: Tensor) -> bool:
    if found.shape != expected.shape:
        return False
    return bool((found - expected).norm() <= TOLERANCE * expected.norm())
