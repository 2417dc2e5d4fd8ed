"""KV of blocks as tensors of the host, on the way to and from a file.

    part    one tensor per group of layers with equal heads and dims, and one for its factors:
            (num_blocks, num_layers, 2, block_size, num_kv_heads, bytes) uint8, the pool's bytes

It knows no file and no context. Slots that hold nothing of the image are written as zeros, so that
no snapshot shows what a block held before.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from agentkv.model.kv_cache import KVCache

Parts = Mapping[str, Tensor]


class KVImages:
    """Reads and writes blocks of one pool.

    Invariant: what `write` puts into the pool is what `read` took from it, to the bit.
    """

    def __init__(self, kv: KVCache) -> None:
        self._kv = kv
        # Bytes: some operations do not know every dtype that KV may have.
        self._pool = {name: tensor.view(torch.uint8) for name, tensor in kv.parts().items()}

    @property
    def layout(self) -> dict[str, str]:
        """Says what a block consists of: for each part its dtype and its shape."""
        return {
            name: f"{tensor.dtype} {[*tensor.shape[:2], *tensor.shape[3:]]}"
            for name, tensor in self._kv.parts().items()
        }

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Says the shape of one block of each part, as stored: bytes."""
        return {name: (*pool.shape[:2], *pool.shape[3:]) for name, pool in self._pool.items()}

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block, all parts."""
        return sum(pool.nbytes // self._kv.num_blocks for pool in self._pool.values())

    def read(self, block_ids: Sequence[int], used: Sequence[int]) -> Parts:
        """Copies blocks to the host.

        Args:
            block_ids: Of the pool.
            used: For each, the leading slots that are wanted; the others become zeros.
        """
        parts = {}
        with torch.inference_mode():
            for name, pool in self._pool.items():
                ids = torch.tensor(block_ids, dtype=torch.int64, device=pool.device)
                part = pool.index_select(2, ids).movedim(2, 0).contiguous().to("cpu")
                for row, count in enumerate(used):
                    part[row, :, :, count:].zero_()
                parts[name] = part
        return parts

    def write(self, block_ids: Sequence[int], rows: Sequence[int], parts: Parts) -> None:
        """Copies rows of parts that were read earlier into blocks of the pool.

        Args:
            block_ids: Of the pool.
            rows: For each, which row of the parts it gets.
            parts: As `read` returned them.
        """
        with torch.inference_mode():
            for name, pool in self._pool.items():
                ids = torch.tensor(block_ids, dtype=torch.int64, device=pool.device)
                chosen = parts[name].index_select(0, torch.tensor(rows, dtype=torch.int64))
                pool.index_copy_(2, ids, chosen.movedim(0, 2).to(pool.device))
