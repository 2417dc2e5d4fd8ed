"""Keys and values of the device pool, all layers: the tensors behind block ids.

    group    layers with equal heads and dims lie in one tensor:
             (num_layers, 2, num_blocks, block_size, num_kv_heads, head_dim), 0 = keys, 1 = values
    donor    a layer that reads another one's KV has no storage of its own
    factors  of an 8-bit pool: one for each token and head, laid out like the group

Which block belongs to whom is decided elsewhere; here a block id is an index.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from agentkv.core.batch import BlockCopy
from agentkv.model.model_shape import ModelShape
from agentkv_kernels import KVScales, allocate_kv, copy_blocks

KV_DTYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
"""What KV may be stored as instead of the model's own dtype, by the option's word."""


class _Group(NamedTuple):
    """Storage of layers with equal heads and dims."""

    numbers: Tensor
    """(num_layers, 2, num_blocks, block_size, num_kv_heads, head_dim)."""
    factors: Tensor | None
    """(num_layers, 2, num_blocks, block_size, num_kv_heads, 1) float32, of an 8-bit pool."""

    def scales(self, place: int) -> KVScales | None:
        """Returns the factors of one of the layers, as views."""
        if self.factors is None:
            return None
        keys, values = self.factors[place].squeeze(-1)
        return KVScales(keys, values)


class KVCache:
    """K and V of `num_blocks` blocks.

    Invariant: block i of every layer is written and copied together; no method touches a slot
    other than those it names.
    """

    def __init__(
        self,
        shape: ModelShape,
        *,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Allocates the pool on the model's device; nobody reads a slot before it is written.

        Args:
            shape: Of the model; says which layers have KV, and how large it is.
            num_blocks: At least 1.
            block_size: Token positions per block, at least 1.
            dtype: One of KV_DTYPES' for an 8-bit pool; None stores what the model computes.
        """
        self.shape = shape
        self.dtype = dtype or shape.dtype
        self.num_blocks = num_blocks
        self.block_size = block_size
        places: dict[tuple[int, int], list[int]] = {}
        for index, layer in enumerate(shape.layers):
            if layer.donor == index:
                places.setdefault((layer.num_kv_heads, layer.head_dim), []).append(index)
        self._groups: list[_Group] = []
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}
        self._scales: dict[int, KVScales | None] = {}
        for (num_kv_heads, head_dim), owners in places.items():
            group = self._allocate(len(owners), num_kv_heads, head_dim)
            self._groups.append(group)
            for place, owner in enumerate(owners):
                self._layers[owner] = (group.numbers[place, 0], group.numbers[place, 1])
                self._scales[owner] = group.scales(place)

    def _allocate(self, num_layers: int, num_kv_heads: int, head_dim: int) -> _Group:
        sizes = (num_layers, self.num_blocks, self.block_size, num_kv_heads)
        device = self.shape.device
        numbers = allocate_kv(*sizes, head_dim, dtype=self.dtype, device=device)
        if not self.is_quantised:
            return _Group(numbers, None)
        return _Group(numbers, allocate_kv(*sizes, 1, dtype=torch.float32, device=device))

    @property
    def bytes_per_block(self) -> int:
        """Bytes of K and V of one block, all layers together."""
        return self.shape.bytes_per_block(self.block_size, self.dtype)

    def owns_kv(self, layer: int) -> bool:
        """Whether the layer writes KV; False when it reads another layer's."""
        return self.shape.layers[layer].donor == layer

    def layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """Returns the keys and values a layer reads.

        Returns:
            Two views (num_blocks, block_size, num_kv_heads, head_dim) of the pool itself.
        """
        return self._layers[self.shape.layers[layer].donor]

    def scales(self, layer: int) -> KVScales | None:
        """Returns the factors of what a layer reads, views of the pool; None unless it is 8-bit."""
        return self._scales[self.shape.layers[layer].donor]

    def parts(self) -> dict[str, Tensor]:
        """Returns every tensor of the pool by a name that depends on the model alone.

        Each is (num_layers, 2, num_blocks, block_size, num_kv_heads, width).
        """
        parts = {}
        for number, group in enumerate(self._groups):
            parts[f"group{number}.numbers"] = group.numbers
            if group.factors is not None:
                parts[f"group{number}.factors"] = group.factors
        return parts

    @property
    def is_quantised(self) -> bool:
        """Whether the pool stores 8-bit numbers and factors."""
        return self.dtype in KV_DTYPES.values()

    def block(self, block_id: int) -> list[Tensor]:
        """Lists the tensors that hold a block, as views of the pool.

        Returns:
            Each (num_layers, 2, block_size, num_kv_heads, width): numbers, and factors of an 8-bit
            pool.
        """
        return [
            tensor[:, :, block_id]
            for group in self._groups
            for tensor in (group.numbers, group.factors)
            if tensor is not None
        ]

    def copy(self, copies: Sequence[BlockCopy]) -> None:
        """Copies the first `num_tokens` slots of each source block, K and V of every layer.

        Args:
            copies: Done in order; the other slots of a destination keep their content.
        """
        if not copies:
            return
        sources = [copy.src_block_id for copy in copies]
        destinations = [copy.dst_block_id for copy in copies]
        counts = [copy.num_tokens for copy in copies]
        for group in self._groups:
            copy_blocks(group.numbers, sources, destinations, counts)
            if group.factors is not None:
                copy_blocks(group.factors, sources, destinations, counts)

    def poison(self, value: float) -> None:
        """Fills every slot of every layer with a value, so that a test sees who reads too much.

        In an 8-bit pool it is the factors that get the value.
        """
        for group in self._groups:
            if group.factors is None:
                group.numbers.fill_(value)
            else:
                group.numbers.fill_(1)
                group.factors.fill_(value)
