"""How the KV of one block is written down outside the device pool: bytes in a row.

    exact   each tensor of the block as it is, one after the other
    int8    each token and head rounded to 8 bits, with a float32 factor; a quarter of float32

It knows no tier and no file. A row is a one-dimensional uint8 tensor of `num_bytes`.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from agentkv.model.kv_cache import KVCache
from agentkv_kernels.quantise import dequantise, quantise

ALIGNMENT = 16
"""Bytes at whose multiples each tensor begins, so that it can be viewed as its dtype."""


class BlockFormat:
    """Packs blocks of one pool into rows and unpacks them.

    Invariant: what `unpack` writes is what `pack` read, to the bit unless rows are 8-bit.
    """

    def __init__(self, kv: KVCache, *, rounds: bool = False) -> None:
        """Plans a row.

        Args:
            kv: The device pool.
            rounds: Whether floating numbers are kept in 8 bits; a pool of 8 bits stays as it is.
        """
        self._kv = kv
        parts = kv.block(0)
        self._rounds = rounds and not kv.is_quantised
        self.num_bytes = sum(
            _aligned(tensor.numel() * tensor.element_size())
            for part in parts
            for tensor in self._stored(part)
        )

    def pack(self, block_id: int, row: Tensor) -> None:
        """Writes a block of the pool into a row."""
        stored = [tensor for part in self._kv.block(block_id) for tensor in self._stored(part)]
        for tensor, room in zip(stored, self._rooms(row), strict=True):
            room.copy_(tensor)

    def unpack(self, row: Tensor, block_id: int) -> None:
        """Writes a row into a block of the pool."""
        rooms = self._rooms(row)
        for part in self._kv.block(block_id):
            if self._rounds:
                numbers, factors = next(rooms), next(rooms)
                part.copy_(dequantise(numbers, factors, part.dtype))
            else:
                part.copy_(next(rooms))

    def _stored(self, part: Tensor) -> tuple[Tensor, ...]:
        """Makes what a row holds of a part (num_layers, 2, block_size, num_kv_heads, width)."""
        return tuple(quantise(part, torch.int8)) if self._rounds else (part,)

    def _rooms(self, row: Tensor) -> Iterator[Tensor]:
        """Yields views of a row, shaped as what is stored."""
        offset = 0
        for part in self._kv.block(0):
            shapes = [(part.dtype, part.shape)]
            if self._rounds:
                shapes = [(torch.int8, part.shape), (torch.float32, part.shape[:-1])]
            for dtype, shape in shapes:
                size = shape.numel() * dtype.itemsize
                yield row[offset : offset + size].view(dtype).view(shape)
                offset += _aligned(size)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
