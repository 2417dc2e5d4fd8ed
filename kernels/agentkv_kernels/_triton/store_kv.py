"""Writing one step's keys and values into their slots: one launch for both.

With scales the numbers become 8-bit on the way: one factor per token and head, absmax / largest.
"""

import triton
import triton.language as tl
from torch import Tensor

from agentkv_kernels._triton.compat import launch_options
from agentkv_kernels._triton.tile_config import padded
from agentkv_kernels.quantise import LARGEST, KVScales


@triton.jit
def _write(new, cache, scale, d, kept, place, scale_place, FULL: tl.constexpr):
    """Writes one token's numbers of one head, quantised if FULL is not 0."""
    numbers = tl.load(new + d, mask=kept, other=0.0)
    if FULL != 0.0:
        numbers = numbers.to(tl.float32)
        factor = tl.max(tl.abs(numbers), 0) / FULL
        numbers = numbers / tl.where(factor == 0.0, 1.0, factor)
        if cache.dtype.element_ty == tl.int8:
            numbers = tl.floor(numbers + 0.5)
        tl.store(scale + scale_place, factor)
    tl.store(cache + place + d, numbers.to(cache.dtype.element_ty), mask=kept)


@triton.jit
def store_kv_kernel(
    key,  # (num_rows, num_kv_heads, HEAD_DIM)
    value,
    k_cache,
    v_cache,
    k_scale,
    v_scale,
    slots,  # (num_rows,) int64
    key_row_stride,
    key_head_stride,
    value_row_stride,
    value_head_stride,
    k_block_stride,
    k_token_stride,
    k_head_stride,
    v_block_stride,
    v_token_stride,
    v_head_stride,
    scale_block_stride,
    scale_token_stride,
    scale_head_stride,
    HEAD_DIM: tl.constexpr,
    V_HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    FULL: tl.constexpr,
):
    """Writes one row's key and value of one head."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    slot = tl.load(slots + row)
    if slot < 0:
        return
    block = slot // BLOCK_SIZE
    offset = slot % BLOCK_SIZE
    d = tl.arange(0, BLOCK_D)
    dv = tl.arange(0, BLOCK_V)
    scale_place = (
        block * scale_block_stride + offset * scale_token_stride + head * scale_head_stride
    )
    _write(
        key + row * key_row_stride + head * key_head_stride,
        k_cache,
        k_scale,
        d,
        d < HEAD_DIM,
        block * k_block_stride + offset * k_token_stride + head * k_head_stride,
        scale_place,
        FULL,
    )
    _write(
        value + row * value_row_stride + head * value_head_stride,
        v_cache,
        v_scale,
        dv,
        dv < V_HEAD_DIM,
        block * v_block_stride + offset * v_token_stride + head * v_head_stride,
        scale_place,
        FULL,
    )


def store_kv(
    key: Tensor,
    value: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    scales: KVScales | None,
) -> None:
    """Writes rows into slots; arguments as in `ops.store_kv`, checked there.

    Args:
        key: (num_rows, num_kv_heads, head_dim), stride 1 in the last dimension.
        value: The same with v_cache's head_dim.
        k_cache: (num_blocks, block_size, num_kv_heads, head_dim), stride 1 in the last dimension.
        v_cache: The same.
        slots: (num_rows,) int64, contiguous; negative ones are skipped.
        scales: Factors of 8-bit caches.
    """
    num_rows, num_kv_heads, head_dim = key.shape
    if not num_rows:
        return
    v_head_dim = value.shape[2]
    k_scale, v_scale = scales or (k_cache, v_cache)
    store_kv_kernel[(num_rows, num_kv_heads)](
        key,
        value,
        k_cache,
        v_cache,
        k_scale,
        v_scale,
        slots,
        *key.stride()[:2],
        *value.stride()[:2],
        *k_cache.stride()[:3],
        *v_cache.stride()[:3],
        *(k_scale.stride() if scales else (0, 0, 0)),
        HEAD_DIM=head_dim,
        V_HEAD_DIM=v_head_dim,
        BLOCK_SIZE=k_cache.shape[1],
        BLOCK_D=padded(head_dim),
        BLOCK_V=padded(v_head_dim),
        FULL=LARGEST[k_cache.dtype] if scales else 0.0,
        **launch_options(1),
    )
