"""The merge: partial results of one row become its output, sinks added once.

Always in the order of the list, ancestors first, without atomics: a work list gives the same bits
each time. Rows that no item writes are written here, zeros where there is nothing to merge.
"""

import triton
import triton.language as tl
from torch import Tensor

from agentkv_kernels._triton.compat import launch_options
from agentkv_kernels._triton.tile_config import padded
from agentkv_kernels._triton.tree_attention import Partials
from agentkv_kernels.work_buffers import WorkBuffers

PARTS_AT_ONCE = 16
"""Partials that one step loads."""


@triton.jit
def merge_kernel(
    out,  # (num_rows, num_q_heads, V_HEAD_DIM)
    part_out,  # (num_partials, num_q_heads, V_HEAD_DIM) float32, contiguous
    part_lse,  # (num_partials, num_q_heads) float32, contiguous
    sinks,
    num_merged,  # one int32: programs beyond leave at once
    merge_rows,
    merge_begins,
    merge_parts,
    out_row_stride,
    out_head_stride,
    NUM_Q_HEADS: tl.constexpr,
    V_HEAD_DIM: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_P: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    """Merges the partials of one row and head."""
    program = tl.program_id(0)
    index = program // NUM_Q_HEADS
    if index >= tl.load(num_merged):
        return
    head = program % NUM_Q_HEADS
    row = tl.load(merge_rows + index).to(tl.int64)
    begin = tl.load(merge_begins + index)
    end = tl.load(merge_begins + index + 1)
    dv = tl.arange(0, BLOCK_V)
    p = tl.arange(0, BLOCK_P)
    top = tl.full([1], -1e30, tl.float32)
    total = tl.zeros([1], tl.float32)
    if HAS_SINKS:
        sink = tl.load(sinks + head).to(tl.float32) * 1.4426950408889634
        top = tl.maximum(top, sink)
        total = tl.exp2(sink - top)
    summed = tl.zeros([BLOCK_V], tl.float32)
    for first in range(begin, end, BLOCK_P):
        listed = first + p < end
        part = tl.load(merge_parts + first + p, mask=listed, other=0)
        place = part.to(tl.int64) * NUM_Q_HEADS + head
        lse = tl.load(part_lse + place, mask=listed, other=float("-inf"))
        result = tl.load(
            part_out + place[:, None] * V_HEAD_DIM + dv[None, :],
            mask=listed[:, None] & (dv < V_HEAD_DIM)[None, :],
            other=0.0,
        )
        higher = tl.maximum(top, tl.max(lse, 0))
        shrink = tl.exp2(top - higher)
        weights = tl.exp2(lse - higher)
        total = total * shrink + tl.sum(weights, 0)
        summed = summed * shrink + tl.sum(weights[:, None] * result, 0)
        top = higher
    summed = summed / tl.where(total == 0.0, 1.0, total)
    tl.store(
        out + row * out_row_stride + head * out_head_stride + dv,
        summed.to(out.dtype.element_ty),
        mask=dv < V_HEAD_DIM,
    )


def merge(buffers: WorkBuffers, partials: Partials, sinks: Tensor | None, out: Tensor) -> None:
    """Merges the partials of every row that has some, and writes zeros to rows that have none.

    Args:
        buffers: The work list that the partials come from.
        partials: As `attend_items` left them.
        sinks: (num_q_heads,) logits added to each row's denominator.
        out: (num_rows, num_q_heads, v_head_dim), stride 1 in the last dimension.
    """
    capacity = buffers.buckets.merge
    if not capacity:
        return
    num_q_heads, v_head_dim = out.shape[1:]
    # One by one in batch-invariant mode: an empty partial in the list then changes no bit.
    step = 1 if buffers.options.batch_invariant else PARTS_AT_ONCE
    merge_kernel[(capacity * num_q_heads,)](
        out,
        partials.out,
        partials.lse,
        out if sinks is None else sinks,
        buffers.part("counts")[2:],
        buffers.part("merge_rows"),
        buffers.part("merge_begins"),
        buffers.part("merge_parts"),
        *out.stride()[:2],
        NUM_Q_HEADS=num_q_heads,
        V_HEAD_DIM=v_head_dim,
        BLOCK_V=padded(v_head_dim),
        BLOCK_P=step,
        HAS_SINKS=sinks is not None,
        **launch_options(4 if v_head_dim > 64 else 2),
    )
