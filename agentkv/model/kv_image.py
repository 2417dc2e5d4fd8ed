"""KV of blocks as tensors of the host, on the way to and from a file.

    part    one tensor per group of layers with equal heads and dims, and one for its factors:
            (num_blocks, num_layers, 2, block_size, num_kv_heads, bytes) uint8, the pool's bytes

It knows no file and no context. Slots that hold nothing of the image are written as zeros, so that
no snapshot shows what a block held before.
"""

from array import array
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from agentkv.model.kv_cache import KVCache
from agentkv.model.tensor_file import decode, encode

Parts = Mapping[str, Tensor]
TOKENS = "tokens"
"""Name of the one tensor in a file of tokens, (num_tokens,) int32."""


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

    def write(self, block_ids: Sequence[int], rows: Sequence[int], parts: object) -> None:
        """Copies rows of parts that were read earlier into blocks of the pool.

        Args:
            block_ids: Of the pool.
            rows: For each, which row of the parts it gets.
            parts: As `read` returned them.
        """
        assert isinstance(parts, Mapping)
        with torch.inference_mode():
            for name, pool in self._pool.items():
                ids = torch.tensor(block_ids, dtype=torch.int64, device=pool.device)
                chosen = parts[name].index_select(0, torch.tensor(rows, dtype=torch.int64))
                pool.index_copy_(2, ids, chosen.movedim(0, 2).to(pool.device))

    def encode(self, parts: object) -> bytes:
        """Writes what was read as a file."""
        assert isinstance(parts, Mapping)
        return encode(parts)

    def decode(self, data: bytes, num_blocks: int) -> Parts | None:
        """Reads a file of so many blocks; None when it is none, or of another layout."""
        shapes = {
            name: (num_blocks, *pool.shape[:2], *pool.shape[3:])
            for name, pool in self._pool.items()
        }
        return decode(data, shapes, torch.uint8)

    def encode_tokens(self, tokens: "array[int]") -> bytes:
        """Writes tokens as a file."""
        return encode({TOKENS: torch.tensor(tokens, dtype=torch.int32)})

    def decode_tokens(self, data: bytes, num_tokens: int) -> "array[int] | None":
        """Reads a file of so many tokens; None when it is none."""
        tensors = decode(data, {TOKENS: (num_tokens,)}, torch.int32)
        if tensors is None or bool((tensors[TOKENS] < 0).any()):
            return None
        return array("I", tensors[TOKENS].tolist())
