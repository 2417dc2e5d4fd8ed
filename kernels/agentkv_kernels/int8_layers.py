"""Decoder layers with 8-bit weights, by native calls: what they consist of, what a call computes.

    before attention   RMS norm, q, k and v, rotary embedding
    after attention    output projection, residual, RMS norm, gate and up, SiLU, down, residual
    all layers         both, and attention in between, layer after layer in one call

Owns addresses and what crosses into `_native/int8_layer.c` and `int8_layers.c`. Which layers of a
model are such layers is decided elsewhere.
"""

import ctypes
import struct
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from agentkv_kernels.cpu_native import Modifiers, NewKV, calls_of
from agentkv_kernels.int8_weights import Int8Products, Int8Weights, Norm, scratch_bytes
from agentkv_kernels.plan import AttentionPlan
from agentkv_kernels.quantise import KVScales

_DECODER = struct.Struct("=12Q2d")
"""Decoder's fields of `int8_layers.c`."""
_P, _N, _F = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float


class LayerParts(NamedTuple):
    """What a layer consists of."""

    head_dim: int
    num_heads: int
    num_kv_heads: int
    first_norm: Norm
    inputs: Int8Weights
    """Of q, k and v, in a row."""
    input_bias: Tensor | None
    output: Int8Weights
    output_bias: Tensor | None
    second_norm: Norm
    gates_ups: Int8Weights
    """In turn."""
    down: Int8Weights


class LayerCaches(NamedTuple):
    """Where a layer's KV lies."""

    key: Tensor
    """(num_blocks, block_size, num_kv_heads, head_dim)."""
    value: Tensor
    """The same."""
    scales: KVScales | None


class Angles(NamedTuple):
    """Of the rotary embedding, (1, num_rows, head_dim) float32, dense."""

    cosines: Tensor
    sines: Tensor


class LayerRun:
    """Layers that follow each other, and where their KV lies: what one call computes."""

    def __init__(
        self, parts: Sequence[LayerParts], caches: Sequence[LayerCaches], modifiers: Modifiers
    ) -> None:
        """Takes layers that differ in their weights alone.

        Args:
            parts: Of each layer, all of the same sizes.
            caches: Of each layer; shapes, strides and dtypes are alike.
            modifiers: What every layer asks of attention.
        """
        assert len({_layout(cache) for cache in caches}) == 1, "the layers' caches differ"
        self.parts = tuple(parts)
        self.caches = caches
        self.modifiers = modifiers
        packed = b"".join(_packed(*layer) for layer in zip(parts, caches, strict=True))
        self._decoders = ctypes.create_string_buffer(packed, len(packed))
        self.address = ctypes.addressof(self._decoders)
        """Of what `int8_layers.c` reads."""


class Int8Layers:
    """Computes layers; holds the native functions."""

    def __init__(self, products: Int8Products) -> None:
        """Takes what multiplies; it must have native kernels."""
        native = products.native
        assert native is not None, "there are no native kernels"
        self._scratch = products.scratch
        self._run_before = native.function(
            *("int8_before_attention", _P, _N, _N, _P, _F, _P, _P, _P, _P, _N, _N, _N, _P, _P, _N)
        )
        self._run_after = native.function(
            *("int8_after_attention", _P, _N, _N, _P, _N, _P, _P, _P, _F, _P, _P, _N, _P, _N)
        )
        self._run_all = native.function("int8_layers", _P, _N, _P, _N, _N, _N, *[_P] * 6)

    def before(self, parts: LayerParts, hidden: Tensor, angles: Angles) -> tuple[Tensor, ...]:
        """Computes what attention is given.

        Args:
            parts: Of the layer.
            hidden: (1, num_rows, width) float32, dense.
            angles: Of the rows.

        Returns:
            Query, key and value, (num_rows, heads of each, head_dim), views of one tensor.
        """
        _, num_rows, width = hidden.shape
        heads = _new_heads(parts, hidden)
        rotated, num_heads = parts.num_heads + parts.num_kv_heads, heads.shape[1]
        self._run_before(
            hidden.data_ptr(),
            num_rows,
            width,
            parts.first_norm.weight.data_ptr(),
            parts.first_norm.epsilon,
            parts.inputs.panels.data_ptr(),
            _address(parts.input_bias),
            angles.cosines.data_ptr(),
            angles.sines.data_ptr(),
            parts.head_dim,
            rotated,
            num_heads,
            heads.data_ptr(),
            self._scratch.at_least(scratch_bytes(num_rows, width)),
            torch.get_num_threads(),
        )
        return _split(parts, heads)

    def after(self, parts: LayerParts, hidden: Tensor, attended: Tensor) -> Tensor:
        """Computes what the layer answers.

        Args:
            parts: Of the layer.
            hidden: What the layer was given; overwritten.
            attended: (num_rows, num_heads, head_dim) float32, dense.

        Returns:
            `hidden`.
        """
        _, num_rows, width = hidden.shape
        inner = parts.down.num_inputs
        self._run_after(
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
            self._scratch.at_least(_bytes_after(parts, num_rows, width)),
            torch.get_num_threads(),
        )
        return hidden

    def run(
        self,
        layers: "LayerRun",
        hidden: Tensor,
        angles: Angles,
        slots: Tensor | None,
        plan: AttentionPlan,
    ) -> Tensor | None:
        """Computes layers that follow each other.

        Args:
            layers: Which, and where their KV lies.
            hidden: (1, num_rows, width) float32, dense; not changed.
            angles: Of the rows.
            slots: Where new KV goes, (num_rows,) int64; None: nowhere.
            plan: What the rows read.

        Returns:
            (1, num_rows, width); None, with nothing done, where attention cannot be native.

        Raises:
            ValueError: A shape, size or slot does not fit.
            TypeError: A dtype does not fit.
        """
        calls = calls_of(plan)
        if calls is None:
            return None
        parts = layers.parts[0]
        _, num_rows, width = hidden.shape
        query, key, value = _split(parts, _new_heads(parts, hidden))
        new = None if slots is None else NewKV(key, value, slots)
        attended = calls.lay_out(
            query, *layers.caches[0][:2], layers.modifiers, None, layers.caches[0].scales, new
        )
        if attended is None:
            return None
        out = hidden.clone()
        self._run_all(
            layers.address,
            len(layers.parts),
            calls.address,
            num_rows,
            width,
            parts.down.num_inputs,
            angles.cosines.data_ptr(),
            angles.sines.data_ptr(),
            out.data_ptr(),
            self._scratch.at_least(_bytes_after(parts, num_rows, width)),
            *calls.slot_range,
        )
        calls.check_slots(layers.caches[0].key)
        return out


def _new_heads(parts: LayerParts, hidden: Tensor) -> Tensor:
    """Makes room for q, k and v, (num_rows, heads of all three, head_dim)."""
    num_heads = parts.num_heads + 2 * parts.num_kv_heads
    return hidden.new_empty((hidden.shape[1], num_heads, parts.head_dim))


def _split(parts: LayerParts, heads: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    rotated = parts.num_heads + parts.num_kv_heads
    return heads[:, : parts.num_heads], heads[:, parts.num_heads : rotated], heads[:, rotated:]


def _bytes_after(parts: LayerParts, num_rows: int, width: int) -> int:
    numbers = parts.output.num_inputs + width + 2 * parts.down.num_inputs
    return scratch_bytes(num_rows, numbers)


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _layout(caches: LayerCaches) -> tuple[object, ...]:
    tensors = (caches.key, caches.value, *(caches.scales or ()))
    return tuple((tensor.shape, tensor.stride(), tensor.dtype) for tensor in tensors)


def _packed(parts: LayerParts, caches: LayerCaches) -> bytes:
    """Writes a layer as `int8_layers.c` reads it."""
    tensors = (
        *(parts.first_norm.weight, parts.input_bias, parts.output_bias, parts.second_norm.weight),
        *(parts.inputs.panels, parts.output.panels, parts.gates_ups.panels, parts.down.panels),
        *(caches.key, caches.value, *(caches.scales or (None, None))),
    )
    epsilons = (parts.first_norm.epsilon, parts.second_norm.epsilon)
    return _DECODER.pack(*map(_address, tensors), *epsilons)
