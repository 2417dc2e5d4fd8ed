"""Tree attention of one layer on a GPU: the items, then the merge of what has several.

Owns the outputs and the room for partial results. It neither plans nor checks arguments.
"""

import torch
from torch import Tensor

from agentkv_kernels._triton.merge import merge
from agentkv_kernels._triton.tree_attention import Partials, Score, Tiles, attend_items
from agentkv_kernels.quantise import KVScales
from agentkv_kernels.work_buffers import WorkBuffers


def attend(
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    buffers: WorkBuffers,
    score: Score,
    scales: KVScales | None = None,
    *,
    out: Tensor | None = None,
    partials: Partials | None = None,
    tiles: Tiles | None = None,
) -> Tensor:
    """Attends every row of a work list; may be captured into a CUDA graph.

    Args:
        query: (num_rows, num_q_heads, head_dim), stride 1 in the last dimension.
        k_cache: (num_blocks, block_size, num_kv_heads, head_dim), stride 1 in the last dimension.
        v_cache: The same with its own head_dim.
        buffers: The work, loaded, for exactly these sizes.
        score: How scores are made.
        scales: Factors of 8-bit caches.
        out: Where to, (num_rows, num_q_heads, v_head_dim); None: new.
        partials: Room for as many as the list's bucket says; None: new.
        tiles: Instead of the table's, to compare them.
    """
    num_rows, num_q_heads, _ = query.shape
    v_head_dim = v_cache.shape[3]
    if out is None:
        shape = (num_rows, num_q_heads, v_head_dim)
        out = torch.empty(shape, dtype=query.dtype, device=query.device)
    if partials is None:
        count = buffers.buckets.partials
        partials = Partials.empty(count, num_q_heads, v_head_dim, query.device)
    attend_items(query, k_cache, v_cache, buffers, score, scales, out, partials, tiles)
    merge(buffers, partials, score.sinks, out)
    return out
