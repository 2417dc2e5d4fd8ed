"""Tree attention in plain PyTorch, one row after the other: the specification.

Owns the meaning of the operation. It knows nothing of speed: every other implementation is compared
with this one. Nothing that a row does not see is loaded.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from agentkv_kernels.plan import AttentionPlan


def tree_attention(
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    plan: AttentionPlan,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    rows: Sequence[int] | None = None,
) -> tuple[Tensor, Tensor]:
    """Attends each row to what the plan lets it see; arguments as in `ops.tree_attention`.

    With scores s = softcap(scale * q.k) over the visible positions and a head's sink z,
    out = sum(exp(s) * v) / (exp(z) + sum(exp(s))) and lse = log(exp(z) + sum(exp(s))), where a head
    without a sink has exp(z) = 0. A row that sees nothing has out = 0 and lse = z, -inf without
    one. Rows outside of `rows`, when given, are not computed and come out likewise.

    Returns:
        out, (num_rows, num_q_heads, v_head_dim) in the query's dtype, and the natural-log lse,
        (num_rows, num_q_heads). Half precision is computed in float32, and its lse is float32.
    """
    num_rows, num_q_heads, head_dim = query.shape
    num_kv_heads, v_head_dim = v_cache.shape[2:]
    dtype = torch.promote_types(query.dtype, torch.float32)
    out = query.new_zeros((num_rows, num_q_heads, v_head_dim))
    lse = query.new_full((num_rows, num_q_heads), -torch.inf, dtype=dtype)
    slots_of_row = _slots_by_row(plan, window)
    for row in range(num_rows) if rows is None else rows:
        slots = slots_of_row[row].to(k_cache.device)
        keys = _take(k_cache, slots).to(dtype)  # (num_kv, num_kv_heads, head_dim)
        values = _take(v_cache, slots).to(dtype)
        queries = query[row].to(dtype).reshape(num_kv_heads, -1, head_dim)
        scores = torch.einsum("hgd,nhd->hgn", queries, keys).flatten(0, 1) * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        if sinks is not None:  # one more column, whose value is zero
            scores = torch.cat((scores, sinks.to(dtype)[:, None]), dim=1)
            values = torch.cat((values, values.new_zeros((1, num_kv_heads, v_head_dim))))
        if scores.shape[1] == 0:
            continue
        lse[row] = scores.logsumexp(1)
        weights = scores.softmax(1).reshape(num_kv_heads, -1, scores.shape[1])
        out[row] = torch.einsum("hgn,nhd->hgd", weights, values).flatten(0, 1).to(out.dtype)
    return out, lse


def _slots_by_row(plan: AttentionPlan, window: int | None) -> list[Tensor]:
    """Slots each row attends to, (num_visible,) int64, in the order of the runs."""
    parts: list[list[Tensor]] = [[] for _ in range(plan.num_rows)]
    for run in range(plan.num_runs):
        for row in plan.rows[run]:
            begin, end = plan.visible(run, row, window)
            if begin < end:
                parts[row].append(torch.from_numpy(plan.slots(run, begin, end)))
    nothing = torch.empty(0, dtype=torch.int64)
    return [torch.cat(part) if part else nothing for part in parts]


def _take(cache: Tensor, slots: Tensor) -> Tensor:
    """Gathers slots of a cache: (num_slots, num_kv_heads, head_dim)."""
    block_size = cache.shape[1]
    return cache[slots // block_size, slots % block_size]
