"""Tree attention on a CPU with torch alone: a shared run is read once for all rows below it.

Owns the calls and the merge. What is called with which rows and slots was decided by
`cpu_schedule`, once per step. Rows times the query heads of one KV head become the query dimension
of a call; partial results carry their log-sum-exp and are merged by it.

Nothing a row does not see may influence it. Calls load only slots that their rows see; a call with
a mask is the exception, and there 0 x NaN would spread: rows that come out non-finite are computed
again by the reference.
"""

import torch
from torch import Tensor

from agentkv_kernels import reference
from agentkv_kernels.cpu_schedule import Piece, Schedule, Tails, build_schedule
from agentkv_kernels.partial_attention import Partial, attend
from agentkv_kernels.plan import AttentionPlan
from agentkv_kernels.quantise import KVScales, dequantise


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
    scales: KVScales | None = None,
) -> Tensor:
    """Returns what `reference.tree_attention` returns as out; arguments as in `ops`.

    Of 8-bit caches only what a call reads is converted.
    """
    num_rows, num_q_heads, head_dim = query.shape
    dtype = torch.promote_types(query.dtype, torch.float32)
    schedule = plan.derived(build_schedule, window, dtype)
    num_kv_heads, v_head_dim = v_cache.shape[2:]
    group = num_q_heads // num_kv_heads
    grouped = query.reshape(num_rows, num_kv_heads, group, head_dim)
    keys = _Slots(k_cache, None if scales is None else scales.k, query.dtype)
    values = _Slots(v_cache, None if scales is None else scales.v, query.dtype)
    layer = _Layer(grouped, keys, values, scale, softcap)
    merged = _merge(schedule, layer, dtype, sinks)  # (num_kv_heads, num_rows, group, v_head_dim)
    out = query.new_empty((num_rows, num_q_heads, v_head_dim))
    out.view(num_rows, num_kv_heads, group, v_head_dim).copy_(merged.transpose(0, 1))
    if schedule.reads_hidden and not bool(out.sum().isfinite()):
        rows = (~out.flatten(1).isfinite().all(1)).nonzero().flatten().tolist()
        again, _ = reference.tree_attention(
            query,
            k_cache if scales is None else dequantise(k_cache, scales.k, query.dtype),
            v_cache if scales is None else dequantise(v_cache, scales.v, query.dtype),
            plan,
            scale=scale,
            window=window,
            softcap=softcap,
            sinks=sinks,
            rows=rows,
        )
        out[rows] = again[rows]
    return out


class _Layer:
    """One layer's tensors, and the two kinds of call on them."""

    def __init__(
        self,
        query: Tensor,
        keys: "_Slots",
        values: "_Slots",
        scale: float,
        softcap: float | None,
    ) -> None:
        self.query = query  # (num_rows, num_kv_heads, group, head_dim)
        self.by_head = query.transpose(0, 1).contiguous()  # (num_kv_heads, num_rows, group, ...)
        self.k_slots = keys
        self.v_slots = values
        self.scale = scale
        self.softcap = softcap

    def attend_piece(self, piece: Piece) -> Partial:
        """Attends the rows of a piece: out (num_kv_heads, num_rows, group, v_head_dim)."""
        query = _pick(self.by_head, 1, piece.rows)
        num_kv_heads, num_rows, group, head_dim = query.shape
        keys = self.k_slots.take(piece.slots).transpose(0, 1)  # (num_kv_heads, num_kv, head_dim)
        values = self.v_slots.take(piece.slots).transpose(0, 1)
        if piece.causal or piece.mask is not None:
            # The masks are per row, so heads must not share the query dimension with rows.
            keys = keys[:, None].expand(-1, group, -1, -1)
            values = values[:, None].expand(-1, group, -1, -1)
            out, lse = attend(
                query.transpose(1, 2),
                keys,
                values,
                scale=self.scale,
                softcap=self.softcap,
                causal=piece.causal,
                mask=piece.mask,
            )
            return Partial(out.transpose(1, 2), lse.transpose(1, 2))
        packed = query.reshape(1, num_kv_heads, num_rows * group, head_dim)
        out, lse = attend(packed, keys[None], values[None], scale=self.scale, softcap=self.softcap)
        return Partial(
            out.view(num_kv_heads, num_rows, group, -1), lse.view(num_kv_heads, num_rows, group)
        )

    def attend_tails(self, tails: Tails) -> Partial:
        """Attends the rows of a padded batch: out (num_kv_heads, num_rows, group, v_head_dim)."""
        query = _pick(self.query, 0, tails.rows)
        keys = self.k_slots.take(tails.slots).view(len(query), -1, *self.k_slots.cache.shape[2:])
        values = self.v_slots.take(tails.slots).view(len(query), -1, *self.v_slots.cache.shape[2:])
        out, lse = attend(
            query,
            keys.transpose(1, 2),  # (num_rows, num_kv_heads, num_kv, head_dim)
            values.transpose(1, 2),
            scale=self.scale,
            softcap=self.softcap,
            mask=tails.mask,
        )
        return Partial(out.transpose(0, 1), lse.transpose(0, 1))


class _Slots:
    """One cache, seen as slots."""

    def __init__(self, cache: Tensor, factor: Tensor | None, dtype: torch.dtype) -> None:
        self.cache = cache  # (num_blocks, block_size, num_kv_heads, head_dim)
        self.factor = factor  # (num_blocks, block_size, num_kv_heads), of an 8-bit cache
        self.dtype = dtype
        self.block_size = cache.shape[1]

    def take(self, slots: slice | Tensor) -> Tensor:
        """Returns (num_kv, num_kv_heads, head_dim): a view for a slice, a copy for a tensor."""
        if self.factor is None:
            return self._pick(self.cache, slots)
        # As bytes: torch moves no float8 on a CPU.
        taken = self._pick(self.cache.view(torch.uint8), slots).view(self.cache.dtype)
        return dequantise(taken, self._pick(self.factor, slots), self.dtype)

    def _pick(self, cache: Tensor, slots: slice | Tensor) -> Tensor:
        if cache.stride(0) == self.block_size * cache.stride(1):  # slots are evenly spaced
            return _pick(cache.flatten(0, 1), 0, slots)
        if isinstance(slots, slice):
            slots = torch.arange(slots.start, slots.stop)
        return cache[slots // self.block_size, slots % self.block_size]


def _merge(schedule: Schedule, layer: _Layer, dtype: torch.dtype, sinks: Tensor | None) -> Tensor:
    """Runs the calls and merges their results: (num_kv_heads, num_rows, group, v_head_dim)."""
    num_kv_heads, num_rows, group, _ = layer.by_head.shape
    v_head_dim = layer.v_slots.cache.shape[3]
    if len(schedule.pieces) == 1 and not schedule.tails and schedule.complete and sinks is None:
        return layer.attend_piece(schedule.pieces[0]).out
    shape = (schedule.num_levels, num_kv_heads, num_rows, group)
    outs = layer.query.new_empty((*shape, v_head_dim), dtype=dtype)
    lses = layer.query.new_empty(shape, dtype=dtype)
    if not schedule.complete:
        outs.zero_()
        lses.fill_(-torch.inf)
    for piece in schedule.pieces:
        _place(layer.attend_piece(piece), outs[piece.level], lses[piece.level], piece.rows)
    for tails in schedule.tails:
        _place(layer.attend_tails(tails), outs[tails.level], lses[tails.level], tails.rows)
    if sinks is not None:  # one more level, whose result is zero: exactly once per row
        sink = sinks.to(dtype).view(1, num_kv_heads, 1, group).expand(1, -1, num_rows, -1)
        lses = torch.cat((lses, sink))
    weights = lses.softmax(0)
    if schedule.empty_rows and sinks is None:
        weights.masked_fill_((lses == -torch.inf).all(0), 0.0)
    return (weights[: schedule.num_levels, ..., None] * outs).sum(0)


def _place(partial: Partial, outs: Tensor, lses: Tensor, rows: slice | Tensor) -> None:
    """Puts a partial result at its rows of one level."""
    if isinstance(rows, slice):
        outs[:, rows] = partial.out
        lses[:, rows] = partial.lse
    else:
        outs.index_copy_(1, rows, partial.out.to(outs.dtype))
        lses.index_copy_(1, rows, partial.lse)


def _pick(tensor: Tensor, dim: int, index: slice | Tensor) -> Tensor:
    """Takes part of one dimension: a view for a slice, a copy for a tensor."""
    if isinstance(index, slice):
        return tensor.narrow(dim, index.start, index.stop - index.start)
    return tensor.index_select(dim, index)
