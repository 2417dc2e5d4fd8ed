"""Attention of work items: one kernel for decode and extend, shared or not.

One program takes one item for the heads of one KV head: it loads its rows' queries once, walks the
item's KV in tiles, and leaves the rows' output, or a partial result where a row has several items.
Who reads what was decided by `work_list`; merging is `merge`'s.

    scores = softcap(scale * q.k), kept in base 2: exp2 is what the device computes
    out    = sum(exp(s) * v) / sum(exp(s)),  lse = log2(sum(exp(s)))
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from agentkv_kernels._triton.compat import launch_options, upcasts
from agentkv_kernels._triton.tile_config import TileConfig, padded, tile_config
from agentkv_kernels.quantise import KVScales
from agentkv_kernels.work_buffers import WorkBuffers
from agentkv_kernels.work_options import LARGE_TILE, SMALL_TILE

LOG2_E = 1.4426950408889634


class Partials(NamedTuple):
    """Results of rows that have several items."""

    out: Tensor
    """(num_partials, num_q_heads, v_head_dim) float32, normalised."""
    lse: Tensor
    """(num_partials, num_q_heads) float32, in base 2; -inf where nothing was seen."""

    @classmethod
    def empty(
        cls, count: int, num_q_heads: int, v_head_dim: int, device: torch.device
    ) -> "Partials":
        """Allocates room for `count` partials."""
        out = torch.empty((count, num_q_heads, v_head_dim), dtype=torch.float32, device=device)
        return cls(out, torch.empty((count, num_q_heads), dtype=torch.float32, device=device))


class Score(NamedTuple):
    """How scores are made."""

    scale: float
    softcap: float | None
    sinks: Tensor | None
    """(num_q_heads,)"""


class Tiles(NamedTuple):
    """How both classes are compiled."""

    small: TileConfig
    large: TileConfig


def tiles_for(query: Tensor, k_cache: Tensor, v_cache: Tensor) -> Tiles:
    """Takes the table's tiles for tensors like these."""
    dim = max(query.shape[2], v_cache.shape[3])
    sizes = (dim, query.element_size(), k_cache.element_size())
    return Tiles(tile_config(*sizes, large=False), tile_config(*sizes, large=True))


@triton.jit
def tree_attention_kernel(
    out,  # (num_rows, num_q_heads, V_HEAD_DIM)
    part_out,  # (num_partials, num_q_heads, V_HEAD_DIM) float32, contiguous
    part_lse,  # (num_partials, num_q_heads) float32, contiguous
    query,
    k_cache,
    v_cache,
    k_scale,
    v_scale,
    sinks,
    items,  # (capacity, 8) int32
    num_items,  # one int32: programs beyond leave at once
    q_rows,
    blocks,
    kv_lens,
    scale,  # of the scores, in base 2 unless there is a softcap
    softcap,  # in base 2
    window,
    out_row_stride,
    out_head_stride,
    query_row_stride,
    query_head_stride,
    k_block_stride,
    k_token_stride,
    k_head_stride,
    v_block_stride,
    v_token_stride,
    v_head_stride,
    scale_block_stride,
    scale_token_stride,
    scale_head_stride,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,  # of the group, in one tile
    HEAD_DIM: tl.constexpr,
    V_HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    IS_QUANTISED: tl.constexpr,
    UPCAST: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Attends one item's rows, for HEADS heads of one KV head, to the item's positions."""
    NUM_Q_HEADS: tl.constexpr = NUM_KV_HEADS * GROUP
    HEAD_TILES: tl.constexpr = (GROUP + HEADS - 1) // HEADS
    # Heads vary fastest: all programs of one item, which load the same ids, start together.
    program = tl.program_id(0)
    index = program // (NUM_KV_HEADS * HEAD_TILES)
    if index >= tl.load(num_items):
        return
    head_tile = program % (NUM_KV_HEADS * HEAD_TILES)
    kv_head = head_tile // HEAD_TILES
    item = items + index * 8
    q_begin = tl.load(item)
    num_rows = tl.load(item + 1)
    block_offset = tl.load(item + 2)
    begin = tl.load(item + 3)
    cap = tl.load(item + 4)
    part = tl.load(item + 5)

    m = tl.arange(0, BLOCK_M)
    head_in_group = head_tile % HEAD_TILES * HEADS + m % HEADS
    used = (m // HEADS < num_rows) & (head_in_group < GROUP)
    head = kv_head * GROUP + head_in_group
    row = tl.load(q_rows + q_begin + m // HEADS, mask=used, other=0)
    kv_len = tl.load(kv_lens + row, mask=used, other=0)
    end = tl.minimum(cap, tl.max(kv_len, 0))
    low = kv_len - window
    lowest = begin
    if HAS_WINDOW:
        # Tiles stay where they would be without a window: a row's bits do not depend on others.
        lowest = tl.min(tl.where(used, low, 2147483647), 0)
        begin += tl.maximum(lowest - begin, 0) // BLOCK_N * BLOCK_N

    d = tl.arange(0, BLOCK_D)
    dv = tl.arange(0, BLOCK_V)
    row = row.to(tl.int64)
    q = tl.load(
        query + row[:, None] * query_row_stride + head[:, None] * query_head_stride + d[None, :],
        mask=used[:, None] & (d < HEAD_DIM)[None, :],
        other=0.0,
    )
    if UPCAST:
        q = q.to(tl.float32)
    k_base = k_cache + kv_head.to(tl.int64) * k_head_stride
    v_base = v_cache + kv_head.to(tl.int64) * v_head_stride
    k_scale += kv_head.to(tl.int64) * scale_head_stride
    v_scale += kv_head.to(tl.int64) * scale_head_stride

    highest = tl.full([BLOCK_M], -1e30, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    summed = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    n = tl.arange(0, BLOCK_N)
    # The ids of a tile are loaded one tile ahead: loaded in the same step, they would keep the
    # compiler from having more than one tile of K and V in flight.
    ids = tl.load(blocks + block_offset + (begin + n) // BLOCK_SIZE, mask=begin + n < end, other=0)
    for tile in tl.range(begin, end, BLOCK_N):
        position = tile + n
        # Every tile is masked, K and V with zeros: 0 x NaN is NaN, and what nobody wrote may be
        # NaN. A main loop without masks needs twice the registers.
        held = position < end
        if HAS_WINDOW:
            held = held & (position >= lowest)
        block = ids.to(tl.int64)
        offset = position % BLOCK_SIZE
        k = tl.load(
            k_base + (block * k_block_stride + offset * k_token_stride)[None, :] + d[:, None],
            mask=held[None, :] & (d < HEAD_DIM)[:, None],
            other=0.0,
        )
        v = tl.load(
            v_base + (block * v_block_stride + offset * v_token_stride)[:, None] + dv[None, :],
            mask=held[:, None] & (dv < V_HEAD_DIM)[None, :],
            other=0.0,
        )
        if IS_QUANTISED:
            place = block * scale_block_stride + offset * scale_token_stride
            k_factor = tl.load(k_scale + place, mask=held, other=0.0)
            v_factor = tl.load(v_scale + place, mask=held, other=0.0)
            k = k.to(q.dtype)
            v = v.to(q.dtype)
        ids = tl.load(
            blocks + block_offset + (position + BLOCK_N) // BLOCK_SIZE,
            mask=position + BLOCK_N < end,
            other=0,
        )
        if UPCAST:
            k = k.to(tl.float32)
            v = v.to(tl.float32)
        scores = tl.dot(q, k, input_precision=PRECISION) * scale
        if IS_QUANTISED:
            scores = scores * k_factor[None, :]
        if HAS_SOFTCAP:
            # softcap * tanh(s), with s = score / softcap; from 2 ** 60 on tanh is 1.
            power = tl.minimum(scores * 2.8853900817779268, 60.0, propagate_nan=tl.PropagateNan.ALL)
            scores = softcap * (1.0 - 2.0 / (tl.exp2(power) + 1.0))
        seen = held[None, :] & (position[None, :] < kv_len[:, None])
        if HAS_WINDOW:
            seen = seen & (position[None, :] >= low[:, None])
        scores = tl.where(seen, scores, float("-inf"))
        higher = tl.maximum(highest, tl.max(scores, 1))
        weights = tl.exp2(scores - higher[:, None])
        shrink = tl.exp2(highest - higher)
        total = total * shrink + tl.sum(weights, 1)
        summed = summed * shrink[:, None]
        if IS_QUANTISED:
            weights = weights * v_factor[None, :]
        summed = tl.dot(weights.to(v.dtype), v, summed, input_precision=PRECISION)
        highest = higher

    divisor = tl.where(total == 0.0, 1.0, total)
    result = summed / divisor[:, None]
    lse = tl.where(total == 0.0, float("-inf"), highest + tl.log2(divisor))
    stored = used[:, None] & (dv < V_HEAD_DIM)[None, :]
    if part < 0:
        if HAS_SINKS:  # what the merge does, for the one partial there is
            sink = tl.load(sinks + head, mask=used, other=0.0).to(tl.float32) * 1.4426950408889634
            top = tl.maximum(tl.maximum(sink, lse), -1e30)
            weight = tl.exp2(lse - top)
            result = result * weight[:, None] / (tl.exp2(sink - top) + weight)[:, None]
        tl.store(
            out + row[:, None] * out_row_stride + head[:, None] * out_head_stride + dv[None, :],
            result.to(out.dtype.element_ty),
            mask=stored,
        )
    else:
        place = (part + m // HEADS).to(tl.int64) * NUM_Q_HEADS + head
        tl.store(part_out + place[:, None] * V_HEAD_DIM + dv[None, :], result, mask=stored)
        tl.store(part_lse + place, lse, mask=used)


def attend_items(
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    buffers: WorkBuffers,
    score: Score,
    scales: KVScales | None,
    out: Tensor,
    partials: Partials,
    tiles: Tiles | None = None,
) -> None:
    """Runs every item: one launch for each tile class that has any.

    Args:
        query: (num_rows, num_q_heads, head_dim), stride 1 in the last dimension.
        k_cache: (num_blocks, block_size, num_kv_heads, head_dim), stride 1 in the last dimension.
        v_cache: The same with its own head_dim.
        buffers: The work, for exactly these sizes.
        score: How scores are made.
        scales: Factors of 8-bit caches.
        out: (num_rows, num_q_heads, v_head_dim), rows with one item are written.
        partials: Room for those of all other rows.
        tiles: Instead of the table's, to compare them.
    """
    tiles = tiles or tiles_for(query, k_cache, v_cache)
    buckets = buffers.buckets
    classes = ((False, buckets.small, tiles.small), (True, buckets.large, tiles.large))
    for large, capacity, tile in classes:
        if capacity:
            _launch(
                query,
                k_cache,
                v_cache,
                buffers,
                score,
                scales,
                out,
                partials,
                large,
                capacity,
                tile,
            )


def _launch(
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    buffers: WorkBuffers,
    score: Score,
    scales: KVScales | None,
    out: Tensor,
    partials: Partials,
    large: bool,
    capacity: int,
    tile: TileConfig,
) -> None:
    """Starts `capacity` items of one class; those beyond the device's count leave at once."""
    num_q_heads, head_dim = query.shape[1:]
    num_kv_heads, v_head_dim = v_cache.shape[2:]
    options = buffers.options
    assert tile.block_m == (LARGE_TILE if large else SMALL_TILE)
    head_tiles = -(-options.group // options.heads_per_tile)
    unused = query  # for pointers that the variant does not follow
    k_scale, v_scale = scales or (unused, unused)
    scale_strides = k_scale.stride() if scales else (0, 0, 0)
    cap = score.softcap
    tree_attention_kernel[(capacity * num_kv_heads * head_tiles,)](
        out,
        partials.out,
        partials.lse,
        query,
        k_cache,
        v_cache,
        k_scale,
        v_scale,
        unused if score.sinks is None else score.sinks,
        buffers.part("large" if large else "small"),
        buffers.part("counts")[int(large) :],
        buffers.part("q_rows"),
        buffers.part("blocks"),
        buffers.part("kv_lens"),
        score.scale * LOG2_E if cap is None else score.scale / cap,
        0.0 if cap is None else cap * LOG2_E,
        options.window or 0,
        *out.stride()[:2],
        *query.stride()[:2],
        *k_cache.stride()[:3],
        *v_cache.stride()[:3],
        *scale_strides,
        NUM_KV_HEADS=num_kv_heads,
        GROUP=num_q_heads // num_kv_heads,
        HEADS=options.heads_per_tile,
        HEAD_DIM=head_dim,
        V_HEAD_DIM=v_head_dim,
        BLOCK_SIZE=k_cache.shape[1],
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        BLOCK_D=padded(head_dim),
        BLOCK_V=padded(v_head_dim),
        HAS_WINDOW=options.window is not None,
        HAS_SOFTCAP=cap is not None,
        HAS_SINKS=score.sinks is not None,
        IS_QUANTISED=scales is not None,
        UPCAST=upcasts(query.dtype),
        PRECISION="ieee" if query.dtype == torch.float32 else "tf32",
        **launch_options(tile.num_warps, tile.num_stages),
    )
