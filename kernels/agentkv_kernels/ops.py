"""The operations of this package: what they take, what they mean, which implementation runs.

Owns the argument checks and the choice of implementation; the implementations trust it. It knows
nothing of contexts or models.

Shapes used throughout:

    query            (num_rows, num_q_heads, head_dim)
    key, value       (num_rows, num_kv_heads, head_dim)
    k_cache, v_cache (num_blocks, block_size, num_kv_heads, head_dim), any strides
    kv               (num_layers, 2, num_blocks, block_size, num_kv_heads, head_dim)
    slot             block_id * block_size + offset
"""

from collections.abc import Sequence
from typing import Literal, TypedDict

import torch
from torch import Tensor

from agentkv_kernels import cpu, reference
from agentkv_kernels.plan import AttentionPlan

Implementation = Literal["reference", "cpu"]
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class _Options(TypedDict):
    """What the implementations take by keyword."""

    scale: float
    window: int | None
    softcap: float | None
    sinks: Tensor | None


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
    implementation: Implementation | None = None,
) -> Tensor:
    """Attends every row to the KV its runs let it see; AttentionPlan defines what that is.

    Nothing outside a row's visible positions influences it, NaN included. Query head h reads KV
    head h // (num_q_heads // num_kv_heads).

    Args:
        query: (num_rows, num_q_heads, head_dim).
        k_cache: (num_blocks, block_size, num_kv_heads, head_dim), one layer, any strides.
        v_cache: The same with its own head_dim.
        plan: Built for num_rows rows and this block_size.
        scale: Factor on q.k, before the softcap.
        window: Positions a row sees at most, itself included (q - k < window); None: all.
        softcap: Scores become softcap * tanh(score / softcap); None: unchanged.
        sinks: (num_q_heads,) logits added to each row's softmax denominator; None: nothing.
        implementation: "cpu" reads shared KV once; "reference" is the specification, slow, on
            any device. None: "cpu" for CPU tensors, else "reference".

    Returns:
        (num_rows, num_q_heads, v_head_dim), contiguous, in the query's dtype. A row that sees
        nothing is zero.

    Raises:
        ValueError: A shape, size or number does not fit.
        TypeError: A dtype is unsupported or differs between query and caches.
    """
    _check_attention(query, k_cache, v_cache, plan)
    _check_modifiers(query, window, softcap, sinks)
    options = _Options(scale=scale, window=window, softcap=softcap, sinks=sinks)
    if implementation is None:
        implementation = "cpu" if query.device.type == "cpu" else "reference"
    if implementation == "cpu":
        if query.device.type != "cpu":
            raise ValueError(f"implementation 'cpu' cannot run on {query.device}")
        return cpu.tree_attention(query, k_cache, v_cache, plan, **options)
    if implementation == "reference":
        return reference.tree_attention(query, k_cache, v_cache, plan, **options)[0]
    raise ValueError(f"implementation must be 'reference' or 'cpu', not {implementation!r}")


def store_kv(key: Tensor, value: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
    """Writes one step's keys and values into their slots.

    Args:
        key: (num_rows, num_kv_heads, head_dim), the cache's dtype.
        value: The same with v_cache's head_dim.
        k_cache: (num_blocks, block_size, num_kv_heads, head_dim), written in place.
        v_cache: The same, written in place.
        slots: (num_rows,) int64; -1 skips the row. Other rows' slots must be distinct.

    Raises:
        ValueError: A shape does not fit, or a slot lies outside [-1, num_blocks * block_size).
        TypeError: A dtype does not fit.
    """
    _check_caches(k_cache, v_cache)
    num_blocks, block_size, num_kv_heads, _ = k_cache.shape
    if slots.dtype != torch.int64:
        raise TypeError(f"slots must be int64, not {slots.dtype}")
    if slots.dim() != 1:
        raise ValueError(f"slots must have shape (num_rows,), not {tuple(slots.shape)}")
    for name, new, cache in (("key", key, k_cache), ("value", value, v_cache)):
        expected = (slots.shape[0], num_kv_heads, cache.shape[3])
        if new.shape != expected:
            raise ValueError(f"{name} must have shape {expected}, not {tuple(new.shape)}")
        if new.dtype != cache.dtype:
            raise TypeError(f"{name} is {new.dtype}, its cache {cache.dtype}")
    if slots.numel() == 0:
        return
    low, high = (int(bound) for bound in torch.aminmax(slots))
    if low < -1 or high >= num_blocks * block_size:
        raise ValueError(f"slots must lie in [-1, {num_blocks * block_size}): {low}..{high}")
    if low < 0:  # -1 would index the last slot
        kept = (slots >= 0).nonzero().flatten()
        slots, key, value = slots[kept], key[kept], value[kept]
    _write(k_cache, slots, key)
    _write(v_cache, slots, value)


def copy_blocks(
    kv: Tensor, src: Sequence[int], dst: Sequence[int], num_tokens: Sequence[int]
) -> None:
    """Copies the first num_tokens[i] slots of block src[i] to block dst[i], in every layer.

    Copies happen in the order given, so a block may be read by one copy and reused by a later one.
    Other slots of dst keep their content.

    Args:
        kv: (num_layers, 2, num_blocks, block_size, num_kv_heads, head_dim), written in place.
        src: Block ids to read.
        dst: Block ids to write; dst[i] differs from src[i].
        num_tokens: Slots per copy, in [0, block_size].

    Raises:
        ValueError: The lists differ in length, or a number is out of its range. Nothing is copied.
    """
    if kv.dim() != 6 or kv.shape[1] != 2:
        raise ValueError(
            "kv must have shape (num_layers, 2, num_blocks, block_size, num_kv_heads, head_dim), "
            f"not {tuple(kv.shape)}"
        )
    if not len(src) == len(dst) == len(num_tokens):
        raise ValueError(
            f"src, dst and num_tokens must be equally long: {len(src)}, {len(dst)}, "
            f"{len(num_tokens)}"
        )
    num_blocks, block_size = kv.shape[2:4]
    for source, target, count in zip(src, dst, num_tokens, strict=True):
        if not 0 <= source < num_blocks:
            raise ValueError(f"src must lie in [0, {num_blocks}), got {source}")
        if not 0 <= target < num_blocks or target == source:
            raise ValueError(f"dst must lie in [0, {num_blocks}) and not be src, got {target}")
        if not 0 <= count <= block_size:
            raise ValueError(f"num_tokens must lie in [0, {block_size}], got {count}")
    for source, target, count in zip(src, dst, num_tokens, strict=True):
        kv[:, :, target, :count].copy_(kv[:, :, source, :count])


def allocate_kv(
    num_layers: int,
    num_blocks: int,
    block_size: int,
    num_kv_heads: int,
    head_dim: int,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
) -> Tensor:
    """Allocates a zeroed pool in the storage layout the implementations read fastest.

    Storage is token-major, (num_layers, 2, slots, num_kv_heads, head_dim): a run of consecutive
    block ids is one strided view, and a gathered token one contiguous row.

    Returns:
        The logical view (num_layers, 2, num_blocks, block_size, num_kv_heads, head_dim).

    Raises:
        ValueError: A size is not positive.
        TypeError: The dtype is unsupported.
    """
    shape = (num_layers, 2, num_blocks, block_size, num_kv_heads, head_dim)
    if min(shape) < 1:
        raise ValueError(
            "num_layers, num_blocks, block_size, num_kv_heads and head_dim must be positive"
        )
    if dtype not in DTYPES:
        raise TypeError(f"dtype must be one of {DTYPES}, not {dtype}")
    return torch.zeros(shape, dtype=dtype, device=device)


def _write(cache: Tensor, slots: Tensor, new: Tensor) -> None:
    """Puts rows into checked slots of a cache."""
    block_size = cache.shape[1]
    if cache.stride(0) == block_size * cache.stride(1):
        # The pool's own layout: slots are evenly spaced, which makes this 4x faster.
        cache.flatten(0, 1).index_copy_(0, slots, new)
    else:
        cache[slots // block_size, slots % block_size] = new


def _check_caches(k_cache: Tensor, v_cache: Tensor) -> None:
    """Refuses caches that are not two of a kind."""
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        if cache.dim() != 4:
            raise ValueError(
                f"{name} must have shape (num_blocks, block_size, num_kv_heads, head_dim), "
                f"not {tuple(cache.shape)}"
            )
    if k_cache.shape[:3] != v_cache.shape[:3]:
        raise ValueError(
            f"v_cache must match k_cache in all but head_dim: {tuple(v_cache.shape)} against "
            f"{tuple(k_cache.shape)}"
        )
    if v_cache.dtype != k_cache.dtype:
        raise TypeError(f"v_cache is {v_cache.dtype}, k_cache {k_cache.dtype}")


def _check_attention(query: Tensor, k_cache: Tensor, v_cache: Tensor, plan: AttentionPlan) -> None:
    """Refuses tensors that do not fit each other or the plan."""
    if query.dtype not in DTYPES:
        raise TypeError(f"query must be one of {DTYPES}, not {query.dtype}")
    _check_caches(k_cache, v_cache)
    if k_cache.dtype != query.dtype:
        raise TypeError(f"k_cache is {k_cache.dtype}, query {query.dtype}")
    num_blocks, block_size, num_kv_heads, head_dim = k_cache.shape
    if query.dim() != 3 or query.shape[2] != head_dim:
        raise ValueError(
            f"query must have shape (num_rows, num_q_heads, {head_dim}), not {tuple(query.shape)}"
        )
    if num_kv_heads == 0 or query.shape[1] == 0 or query.shape[1] % num_kv_heads:
        raise ValueError(
            f"query has {query.shape[1]} heads, not a multiple of k_cache's {num_kv_heads}"
        )
    if plan.num_rows != query.shape[0]:
        raise ValueError(f"plan has {plan.num_rows} rows, query {query.shape[0]}")
    if plan.block_size != block_size:
        raise ValueError(f"plan has blocks of {plan.block_size}, k_cache of {block_size}")
    if (highest := plan.derived(AttentionPlan.highest_block)) >= num_blocks:
        raise ValueError(f"plan reads block {highest}, k_cache has {num_blocks}")


def _check_modifiers(
    query: Tensor, window: int | None, softcap: float | None, sinks: Tensor | None
) -> None:
    """Refuses a window, softcap or sinks without meaning."""
    if window is not None and window < 1:
        raise ValueError(f"window must be positive, not {window}")
    if softcap is not None and not softcap > 0:
        raise ValueError(f"softcap must be positive, not {softcap}")
    if sinks is not None and sinks.shape != query.shape[1:2]:
        raise ValueError(f"sinks must have shape {tuple(query.shape[1:2])}, not {sinks.shape}")
