"""How large the attention kernel's tiles are, and how they are compiled.

One table, used by the launcher and by `compile_report`, which shows what follows from it:
registers, shared memory, programs per multiprocessor.
"""

from typing import NamedTuple

from agentkv_kernels.work_options import LARGE_TILE, SMALL_TILE


class TileConfig(NamedTuple):
    """Sizes of one compiled variant."""

    block_m: int
    """Rows x heads."""
    block_n: int
    """KV tokens of one step of the loop."""
    num_warps: int
    num_stages: int


def padded(dim: int) -> int:
    """Rounds a head's size up to what a tile can have: a power of two, at least 16."""
    return max(16, 1 << (dim - 1).bit_length())


def tile_config(head_dim: int, item_bytes: int, kv_item_bytes: int, *, large: bool) -> TileConfig:
    """Chooses the tile of a class.

    Args:
        head_dim: The larger of the two heads' sizes.
        item_bytes: Bytes of a number of the query.
        kv_item_bytes: Bytes of a number in the cache.
        large: The class.
    """
    row_bytes = padded(head_dim) * item_bytes
    if not large:
        block_n = 64 if row_bytes <= 256 else 32 if row_bytes <= 512 else 16
        return TileConfig(SMALL_TILE, block_n, 4, 3)
    block_n = 32 if row_bytes <= 256 else 16
    return TileConfig(LARGE_TILE, block_n, 8 if kv_item_bytes < item_bytes else 4, 3)
