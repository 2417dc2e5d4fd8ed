"""Dense attention on a CPU that also returns its log-sum-exp, so that results can be merged.

Owns the choice between torch's fused CPU operator and plain matrix products. It knows nothing of
rows, runs or blocks.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

MAX_SCORES = 1 << 22
"""Scores held at once by the unfused form: 16 MB in float32."""


class Partial(NamedTuple):
    """Attention over a part of the KV."""

    out: Tensor
    """Normalised over that part, (..., num_queries, v_head_dim)."""
    lse: Tensor
    """Natural log of the softmax denominator, (..., num_queries)."""


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float,
    softcap: float | None = None,
    causal: bool = False,
    mask: Tensor | None = None,
) -> Partial:
    """Attends queries to keys.

    Args:
        query: (batch, num_heads, num_queries, head_dim).
        key: (batch, num_heads, num_kv, head_dim), num_kv > 0, any strides, expanded ones included.
        value: (batch, num_heads, num_kv, v_head_dim).
        scale: Factor on the products.
        softcap: Bound of the scores, applied before the mask.
        causal: The i-th query sees the first i + 1 keys.
        mask: Added to the scores, (num_queries, num_kv) or 4-D and broadcastable to
            (batch, num_heads, num_queries, num_kv); float32, or float64 for such queries.

    Returns:
        out in the query's dtype or float32, (batch, num_heads, num_queries, v_head_dim), and lse.
    """
    fused = _FUSED
    if fused is None or softcap is not None or key.shape[3] != value.shape[3]:
        return _attend_unfused(query, key, value, scale, softcap, causal, mask)
    # The operator reads rows of head_dim without looking at their stride.
    query, key, value = (x if x.stride(3) == 1 else x.contiguous() for x in (query, key, value))
    return Partial(*fused(query, key, value, 0.0, causal, attn_mask=mask, scale=scale))


def _attend_unfused(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    softcap: float | None,
    causal: bool,
    mask: Tensor | None,
) -> Partial:
    """The same by matrix products, some queries at a time, half precision in float32."""
    dtype = torch.promote_types(query.dtype, torch.float32)
    keys, value = key.to(dtype).transpose(2, 3), value.to(dtype)
    num_queries, num_kv = query.shape[2], key.shape[2]
    if causal:
        mask = torch.full((num_queries, num_kv), -torch.inf, dtype=dtype).triu_(1)
    step = max(1, MAX_SCORES // (query.shape[0] * query.shape[1] * num_kv))
    outs, lses = [], []
    for begin in range(0, num_queries, step):
        some = slice(begin, begin + step)
        scores = (query[:, :, some].to(dtype) * scale) @ keys
        if softcap is not None:
            scores = softcap * torch.tanh_(scores / softcap)
        if mask is not None:
            scores += mask if mask.shape[-2] == 1 else mask[..., some, :]
        lses.append(scores.logsumexp(3))
        outs.append(scores.softmax(3) @ value)
    return Partial(torch.cat(outs, 2), torch.cat(lses, 2))


def _fused_operator() -> Callable[..., tuple[Tensor, Tensor]] | None:
    """Torch's flash attention for CPUs if it behaves as needed here, else None.

    The operator is private, so it is tried, not trusted: it must return the natural-log lse as
    (batch, heads, queries), take expanded keys, a broadcast mask and a scale.
    """
    try:
        operator = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
        query = torch.linspace(-1.0, 1.0, 2 * 2 * 3 * 4).view(2, 2, 3, 4)
        key = torch.linspace(1.0, -2.0, 2 * 5 * 4).view(2, 1, 5, 4).expand(-1, 2, -1, -1)
        mask = torch.zeros(2, 1, 1, 5)
        mask[1, ..., 3:] = -torch.inf
        got = operator(query, key, key, 0.0, False, attn_mask=mask, scale=0.7)
    except (AttributeError, RuntimeError, TypeError):
        return None
    expected = _attend_unfused(query, key, key, 0.7, None, False, mask)
    fits = all(
        mine.shape == theirs.shape
        and math.isclose(float((mine - theirs).abs().max()), 0, abs_tol=1e-4)
        for mine, theirs in zip(expected, got, strict=True)
    )
    return operator if fits else None


_FUSED = _fused_operator()
