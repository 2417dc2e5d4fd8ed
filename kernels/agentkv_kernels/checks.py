"""What the operations refuse, and how they say so: every message names the argument.

Knows shapes, dtypes, devices and strides. None of these checks waits for a device, except those of
`check_slots`, which looks at numbers.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from agentkv_kernels.quantise import LARGEST, KVScales

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
TRITON_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
CACHE_SHAPE = "(num_blocks, block_size, num_kv_heads, head_dim)"


def check_caches(k_cache: Tensor, v_cache: Tensor) -> None:
    """Refuses caches that are not two of a kind."""
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        if cache.dim() != 4:
            raise ValueError(f"{name} must have shape {CACHE_SHAPE}, not {tuple(cache.shape)}")
    if k_cache.shape[:3] != v_cache.shape[:3]:
        raise ValueError(
            f"v_cache must match k_cache in all but head_dim: {tuple(v_cache.shape)} against "
            f"{tuple(k_cache.shape)}"
        )
    if v_cache.dtype != k_cache.dtype:
        raise TypeError(f"v_cache is {v_cache.dtype}, k_cache {k_cache.dtype}")


def check_scales(k_cache: Tensor, scales: KVScales | None) -> None:
    """Refuses 8-bit caches without factors, factors without 8-bit caches, and misfits."""
    if scales is None:
        if k_cache.dtype in LARGEST:
            raise ValueError(f"scales must be given for caches of {k_cache.dtype}")
        return
    if k_cache.dtype not in LARGEST:
        raise TypeError(f"scales are for caches of {tuple(LARGEST)}, k_cache is {k_cache.dtype}")
    for name, factor in (("scales.k", scales.k), ("scales.v", scales.v)):
        if factor.shape != k_cache.shape[:3]:
            expected = tuple(k_cache.shape[:3])
            raise ValueError(f"{name} must have shape {expected}, not {tuple(factor.shape)}")
        if factor.dtype != torch.float32:
            raise TypeError(f"{name} must be float32, not {factor.dtype}")
    if scales.k.stride() != scales.v.stride():
        raise ValueError(f"scales.v must have scales.k's strides {scales.k.stride()}")


def check_query(
    query: Tensor, k_cache: Tensor, v_cache: Tensor, scales: KVScales | None = None
) -> None:
    """Refuses tensors of attention that do not fit each other."""
    if query.dtype not in DTYPES:
        raise TypeError(f"query must be one of {DTYPES}, not {query.dtype}")
    check_caches(k_cache, v_cache)
    check_scales(k_cache, scales)
    if scales is None and k_cache.dtype != query.dtype:
        raise TypeError(f"k_cache is {k_cache.dtype}, query {query.dtype}")
    num_kv_heads, head_dim = k_cache.shape[2:]
    if query.dim() != 3 or query.shape[2] != head_dim:
        raise ValueError(
            f"query must have shape (num_rows, num_q_heads, {head_dim}), not {tuple(query.shape)}"
        )
    if num_kv_heads == 0 or query.shape[1] == 0 or query.shape[1] % num_kv_heads:
        raise ValueError(
            f"query has {query.shape[1]} heads, not a multiple of k_cache's {num_kv_heads}"
        )
    check_devices(query.device, {"k_cache": k_cache, "v_cache": v_cache})
    if scales is not None:
        check_devices(query.device, {"scales.k": scales.k, "scales.v": scales.v})


def check_plan(
    query: Tensor,
    k_cache: Tensor,
    *,
    num_rows: int,
    block_size: int,
    highest_block: int,
) -> None:
    """Refuses a plan for other rows, other blocks, or blocks that the cache does not have."""
    if num_rows != query.shape[0]:
        raise ValueError(f"plan has {num_rows} rows, query {query.shape[0]}")
    if block_size != k_cache.shape[1]:
        raise ValueError(f"plan has blocks of {block_size}, k_cache of {k_cache.shape[1]}")
    if highest_block >= k_cache.shape[0]:
        raise ValueError(f"plan reads block {highest_block}, k_cache has {k_cache.shape[0]}")


def check_modifiers(
    query: Tensor, window: int | None, softcap: float | None, sinks: Tensor | None
) -> None:
    """Refuses a window, softcap or sinks without meaning."""
    if window is not None and window < 1:
        raise ValueError(f"window must be positive, not {window}")
    if softcap is not None and not softcap > 0:
        raise ValueError(f"softcap must be positive, not {softcap}")
    if sinks is not None:
        if sinks.shape != query.shape[1:2]:
            raise ValueError(f"sinks must have shape {tuple(query.shape[1:2])}, not {sinks.shape}")
        check_devices(query.device, {"sinks": sinks})


def check_new(new: Tensor, cache: Tensor, num_rows: int, name: str) -> None:
    """Refuses keys or values that do not fit their cache."""
    expected = (num_rows, cache.shape[2], cache.shape[3])
    if new.shape != expected:
        raise ValueError(f"{name} must have shape {expected}, not {tuple(new.shape)}")
    if cache.dtype in LARGEST:
        if new.dtype not in TRITON_DTYPES:
            raise TypeError(f"{name} must be one of {TRITON_DTYPES}, not {new.dtype}")
    elif new.dtype != cache.dtype:
        raise TypeError(f"{name} is {new.dtype}, its cache {cache.dtype}")


def check_store(
    key: Tensor,
    value: Tensor,
    slots: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    scales: KVScales | None,
) -> None:
    """Refuses tensors of a store that do not fit each other; looks at no number."""
    check_caches(k_cache, v_cache)
    check_scales(k_cache, scales)
    if slots.dtype != torch.int64:
        raise TypeError(f"slots must be int64, not {slots.dtype}")
    if slots.dim() != 1:
        raise ValueError(f"slots must have shape (num_rows,), not {tuple(slots.shape)}")
    for name, new, cache in (("key", key, k_cache), ("value", value, v_cache)):
        check_new(new, cache, slots.shape[0], name)
    tensors = {"key": key, "value": value, "v_cache": v_cache, "slots": slots}
    check_devices(k_cache.device, tensors)


def check_num_slots(slots: Tensor, num_rows: int) -> None:
    """Refuses slots for another number of rows than a plan has."""
    if len(slots) != num_rows:
        raise ValueError(f"plan has {num_rows} rows, slots {len(slots)}")


def check_slots(slots: Tensor, num_slots: int) -> int:
    """Refuses slots outside of the pool; waits for the slots' device. Returns the lowest."""
    low, high = (int(bound) for bound in torch.aminmax(slots))
    check_slot_range(low, high, num_slots)
    return low


def check_slot_range(low: int, high: int, num_slots: int) -> None:
    """Refuses slots of which the lowest or the highest lies outside of the pool."""
    if low < -1 or high >= num_slots:
        raise ValueError(f"slots must lie in [-1, {num_slots}): {low}..{high}")


def check_pool(kv: Tensor) -> None:
    """Refuses what is no pool of `allocate_kv`'s shape."""
    if kv.dim() != 6 or kv.shape[1] != 2:
        raise ValueError(
            "kv must have shape (num_layers, 2, num_blocks, block_size, num_kv_heads, head_dim), "
            f"not {tuple(kv.shape)}"
        )


def check_copies(
    kv: Tensor, src: Sequence[int], dst: Sequence[int], num_tokens: Sequence[int]
) -> None:
    """Refuses copies between blocks that do not exist, and lists of different lengths."""
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


def check_devices(device: torch.device, tensors: dict[str, Tensor]) -> None:
    """Refuses tensors that lie elsewhere."""
    for name, tensor in tensors.items():
        if tensor.device != device:
            raise ValueError(f"{name} is on {tensor.device}, not on {device}")


def check_unit_stride(tensors: dict[str, Tensor]) -> None:
    """Refuses tensors whose last dimension is not dense: kernels load it in wide pieces."""
    for name, tensor in tensors.items():
        if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
            raise ValueError(
                f"{name} must have stride 1 in its last dimension, not {tensor.stride(-1)}"
            )
