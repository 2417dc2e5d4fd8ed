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
    dim = padded(head_dim)
    if item_bytes == 4:
        return _float32(dim, large=large)
    if not large:
        return TileConfig(SMALL_TILE, 64 if dim <= 128 else 32, num_warps=4, num_stages=3)
    # Numbers of 8 bits are widened in registers: twice the threads to hold them.
    num_warps = 8 if kv_item_bytes < item_bytes else 4
    return TileConfig(LARGE_TILE, 32 if dim <= 128 else 16, num_warps, num_stages=3)


def _float32(dim: int, *, large: bool) -> TileConfig:
    """Tiles without tensor cores, which are less exact than float32: many threads, no spills."""
    if not large:
        return TileConfig(SMALL_TILE, 32 if dim <= 128 else 16, num_warps=8, num_stages=3)
    if dim <= 64:
        return TileConfig(LARGE_TILE, 32, num_warps=8, num_stages=3)
    if dim <= 128:
        return TileConfig(LARGE_TILE, 16, num_warps=16, num_stages=2)
    return TileConfig(LARGE_TILE, 16, num_warps=32, num_stages=2)
