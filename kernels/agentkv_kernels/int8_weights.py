"""Matrix products with weights of 8 bits: how weights are kept, and what a product means.

    weights   integers in [-127, 127], times one factor for 64 inputs of one output
    rows      rounded in the same way when they come in: one factor for 64 inputs of one row
    product   exact within 64 inputs; the groups are then added in float32

By native kernels where there are any, else by torch: slow, and equal to rounding of float32. It
knows no model. The layout is that of `_native/int8_panel.h`.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

import torch
from torch import Tensor

from agentkv_kernels.native import NativeLibrary
from agentkv_kernels.scratch import Scratch

GROUP = 64
"""Inputs that share a factor."""
PANEL = 32
"""Outputs that lie together."""
FACTOR_BYTES = 4 * PANEL
BLOCK_BYTES = FACTOR_BYTES + PANEL * GROUP
"""Bytes of one group of one panel."""
_P, _N, _F = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float


def fits(num_inputs: int) -> bool:
    """Whether rows of so many numbers can be multiplied."""
    return num_inputs > 0 and num_inputs % GROUP == 0


@dataclass(frozen=True, slots=True)
class Int8Weights:
    """The weights of one product, or of several of the same input."""

    panels: Tensor
    """(num_panels, num_groups, BLOCK_BYTES) uint8; a panel is dense."""
    num_outputs: int

    @classmethod
    def pack(cls, weight: Tensor, native: NativeLibrary | None) -> Self:
        """Rounds weights, (num_outputs, num_inputs) float32, dense."""
        panels = _empty(-(-weight.shape[0] // PANEL), weight.shape[1])
        _pack_into(panels, weight, native)
        return cls(panels, weight.shape[0])

    @classmethod
    def pack_in_a_row(cls, weights: Sequence[Tensor], native: NativeLibrary | None) -> Self:
        """Rounds weights of the same input, (num_outputs, num_inputs) each, one after the other.

        Each num_outputs but the last must be a multiple of PANEL.
        """
        sizes = [weight.shape[0] for weight in weights]
        assert all(size % PANEL == 0 for size in sizes[:-1]), "a panel would be of two weights"
        panels = _empty(-(-sum(sizes) // PANEL), weights[0].shape[1])
        start = 0
        for weight, size in zip(weights, sizes, strict=True):
            _pack_into(panels[start : start - (-size // PANEL)], weight, native)
            start -= -size // PANEL
        return cls(panels, sum(sizes))

    @classmethod
    def pack_in_turn(cls, weights: Sequence[Tensor], native: NativeLibrary | None) -> Self:
        """Rounds weights of the same shape; panel i is of weight i % len(weights).

        Args:
            weights: (num_outputs, num_inputs) float32 each, num_outputs a multiple of PANEL.
            native: The kernels, or None.
        """
        num_outputs, num_inputs = weights[0].shape
        assert num_outputs % PANEL == 0, "a panel would be of two weights"
        panels = _empty(len(weights) * num_outputs // PANEL, num_inputs)
        for index, weight in enumerate(weights):
            _pack_into(panels[index :: len(weights)], weight, native)
        return cls(panels, len(weights) * num_outputs)

    @property
    def num_inputs(self) -> int:
        """Width of the rows."""
        return self.panels.shape[1] * GROUP

    @property
    def nbytes(self) -> int:
        """Bytes of weights and factors."""
        return self.panels.nbytes

    def part(self, start: int, end: int, step: int = 1) -> "Int8Weights":
        """Returns a view of every `step`th panel in [start, end)."""
        panels = self.panels[start:end:step]
        return Int8Weights(panels, min(self.num_outputs, PANEL * panels.shape[0]))

    def rows(self, outputs: Tensor) -> Tensor:
        """Returns the weights of some outputs, (*outputs.shape, num_inputs) float32."""
        panel, place = outputs // PANEL, outputs % PANEL
        integers = self._integers()[panel, :, :, place].float().sub_(128)  # (..., groups, 16, 4)
        factors = self._factors()[panel, :, place]  # (..., groups)
        return (integers.flatten(-2) * factors[..., None]).flatten(-2)

    def dequantised(self) -> Tensor:
        """Returns (num_outputs, num_inputs) float32: what the integers stand for."""
        return self.rows(torch.arange(self.num_outputs))

    def _integers(self) -> Tensor:
        """Views (num_panels, num_groups, GROUP / 4, PANEL, 4), uint8, 128 too many."""
        bytes_ = self.panels[..., FACTOR_BYTES:]
        return bytes_.view(*bytes_.shape[:-1], GROUP // 4, PANEL, 4)

    def _factors(self) -> Tensor:
        """Views (num_panels, num_groups, PANEL), float32."""
        return self.panels.view(torch.float32)[..., :PANEL]


class Norm(NamedTuple):
    """An RMS norm (Zhang and Sennrich 2019)."""

    weight: Tensor
    """(width,) float32."""
    epsilon: float

    def apply(self, rows: Tensor) -> Tensor:
        """Normalises (..., width) float32 by torch."""
        return rows * (rows.square().mean(-1, keepdim=True) + self.epsilon).rsqrt() * self.weight


class Int8Products:
    """Multiplies; holds what the native functions need."""

    def __init__(self, native: NativeLibrary | None) -> None:
        """Takes the kernels, or None for torch alone."""
        self.native = native
        self.scratch = Scratch()
        self._linear = self._rows = None
        if native is not None:
            self._linear = native.function(
                *("int8_linear", _P, _N, _N, _P, _F, _P, _N, _P, _P, _N, _P, _N)
            )
            self._rows = native.function("int8_rows", _P, _N, _N, _N, _P, _N, _P)

    def linear(
        self,
        rows: Tensor,
        weights: Int8Weights,
        bias: Tensor | None = None,
        norm: Norm | None = None,
    ) -> Tensor:
        """Multiplies rows with weights.

        Args:
            rows: (..., num_inputs) float32 on a CPU. A row with NaN or inf gives NaN.
            weights: Of `num_inputs` inputs.
            bias: (num_outputs,) float32, or None.
            norm: Of the rows, before they are multiplied; None: as they are.

        Returns:
            (..., num_outputs) float32.
        """
        assert rows.shape[-1] == weights.num_inputs, "rows of another width"
        if self._linear is None:
            return by_torch(rows if norm is None else norm.apply(rows), weights, bias)
        rows = rows.contiguous()
        out = rows.new_empty((*rows.shape[:-1], weights.num_outputs))
        num_rows = rows.numel() // weights.num_inputs
        self._linear(
            rows.data_ptr(),
            num_rows,
            weights.num_inputs,
            None if norm is None else norm.weight.data_ptr(),
            0.0 if norm is None else norm.epsilon,
            weights.panels.data_ptr(),
            weights.panels.stride(0),
            None if bias is None else bias.data_ptr(),
            out.data_ptr(),
            weights.num_outputs,
            self.scratch.at_least(scratch_bytes(num_rows, weights.num_inputs)),
            torch.get_num_threads(),
        )
        return out

    def rows(self, outputs: Tensor, weights: Int8Weights) -> Tensor:
        """Reads the weights of some outputs: an embedding.

        Args:
            outputs: (...) int64, each in [0, num_outputs).
            weights: Of any outputs.

        Returns:
            (*outputs.shape, num_inputs) float32.
        """
        if self._rows is None:
            return weights.rows(outputs)
        outputs = outputs.contiguous()
        out = torch.empty((*outputs.shape, weights.num_inputs))
        self._rows(
            weights.panels.data_ptr(),
            weights.panels.stride(0),
            weights.num_outputs,
            weights.num_inputs,
            outputs.data_ptr(),
            outputs.numel(),
            out.data_ptr(),
        )
        return out


def scratch_bytes(num_rows: int, num_inputs: int) -> int:
    """Bytes in which rows are rounded; a bound for every level."""
    return 4 * num_rows * num_inputs + 4096


def round_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Rounds rows: (..., num_groups, GROUP) integers as float32, (..., num_groups) factors."""
    groups = rows.reshape(*rows.shape[:-1], rows.shape[-1] // GROUP, GROUP)
    factors = groups.abs().amax(-1) / 127
    scale = torch.where(factors > 0, 1 / factors, 0.0)
    integers = (groups * scale[..., None]).round_()
    return integers, factors + (groups.sum(-1) * 0)


def by_torch(rows: Tensor, weights: Int8Weights, bias: Tensor | None = None) -> Tensor:
    """Says in torch what `Int8Products.linear` computes."""
    integers, row_factors = round_rows(rows)
    kept = weights._integers().float().sub_(128)  # the same file
    kept = kept.permute(1, 2, 4, 0, 3).flatten(1, 2).flatten(2)  # (groups, GROUP, padded outputs)
    factors = weights._factors().permute(1, 0, 2).flatten(1)  # (groups, outputs)
    out = rows.new_zeros((*rows.shape[:-1], factors.shape[1]))
    for group in range(len(kept)):  # a product of a group is exact: below 2**24
        exact = integers[..., group, :] @ kept[group]
        out += exact * (row_factors[..., group, None] * factors[group])
    out = out[..., : weights.num_outputs]
    return out if bias is None else out + bias


def _empty(num_panels: int, num_inputs: int) -> Tensor:
    assert fits(num_inputs), f"{num_inputs} inputs are not a multiple of {GROUP}"
    return torch.empty((num_panels, num_inputs // GROUP, BLOCK_BYTES), dtype=torch.uint8)


def _pack_into(panels: Tensor, weight: Tensor, native: NativeLibrary | None) -> None:
    weight = weight.float().contiguous()
    num_outputs, num_inputs = weight.shape
    if native is not None:
        pack = native.function("int8_pack", _P, _N, _N, _P, _N, _N)
        pack(
            weight.data_ptr(),
            num_outputs,
            num_inputs,
            panels.data_ptr(),
            panels.stride(0),
            torch.get_num_threads(),
        )
        return
    padded = weight.new_zeros((len(panels) * PANEL, num_inputs))
    padded[:num_outputs] = weight
    integers, factors = round_rows(padded)  # (outputs, groups, GROUP), (outputs, groups)
    fours = integers.add_(128).to(torch.uint8).view(len(panels), PANEL, -1, GROUP // 4, 4)
    fours = fours.permute(0, 2, 3, 1, 4)  # panel, group, four, output, 4
    panels[..., FACTOR_BYTES:] = fours.flatten(2)
    panels.view(torch.float32)[..., :PANEL] = factors.view(len(panels), PANEL, -1).transpose(1, 2)
