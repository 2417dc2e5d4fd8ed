"""Keys and values of the device pool, all layers: the tensors behind block ids.

    group    layers with equal heads and dims lie in one tensor:
             (num_layers, 2, num_blocks, block_size, num_kv_heads, head_dim), 0 = keys, 1 = values
    donor    a layer that reads another one's KV has no storage of its own

Which block belongs to whom is decided elsewhere; here a block id is an index.
"""

from collections.abc import Sequence

from torch import Tensor

from agentkv.core.batch import BlockCopy
from agentkv.model.model_shape import ModelShape
from agentkv_kernels import allocate_kv, copy_blocks


class KVCache:
    """K and V of `num_blocks` blocks.

    Invariant: block i of every layer is written and copied together; no method touches a slot
    other than those it names.
    """

    def __init__(self, shape: ModelShape, *, num_blocks: int, block_size: int) -> None:
        """Allocates the pool on the model's device; nobody reads a slot before it is written.

        Args:
            shape: Of the model; says which layers have KV, and how large it is.
            num_blocks: At least 1.
            block_size: Token positions per block, at least 1.
        """
        self.shape = shape
        self.num_blocks = num_blocks
        self.block_size = block_size
        places: dict[tuple[int, int], list[int]] = {}
        for index, layer in enumerate(shape.layers):
            if layer.donor == index:
                places.setdefault((layer.num_kv_heads, layer.head_dim), []).append(index)
        self._groups: list[Tensor] = []
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}
        for (num_kv_heads, head_dim), owners in places.items():
            group = allocate_kv(
                len(owners),
                num_blocks,
                block_size,
                num_kv_heads,
                head_dim,
                dtype=shape.dtype,
                device=shape.device,
            )
            self._groups.append(group)
            self._layers |= {
                layer: (group[place, 0], group[place, 1]) for place, layer in enumerate(owners)
            }

    @property
    def bytes_per_block(self) -> int:
        """Bytes of K and V of one block, all layers together."""
        return self.shape.bytes_per_block(self.block_size)

    def owns_kv(self, layer: int) -> bool:
        """Whether the layer writes KV; False when it reads another layer's."""
        return self.shape.layers[layer].donor == layer

    def layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """Returns the keys and values a layer reads.

        Returns:
            Two views (num_blocks, block_size, num_kv_heads, head_dim) of the pool itself.
        """
        return self._layers[self.shape.layers[layer].donor]

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
            copy_blocks(group, sources, destinations, counts)

    def poison(self, value: float) -> None:
        """Fills every slot of every layer with a value, so that a test sees who reads too much."""
        for group in self._groups:
            group.fill_(value)
