"""What moves KV: storing a step's keys and values, copying blocks, allocating a pool.

`checks` says what is refused. Shapes used throughout:

    key, value       (num_rows, num_kv_heads, head_dim)
    k_cache, v_cache (num_blocks, block_size, num_kv_heads, head_dim), any strides
    kv               (num_layers, 2, num_blocks, block_size, num_kv_heads, head_dim)
    slot             block_id * block_size + offset
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from agentkv_kernels import checks
from agentkv_kernels.checks import DTYPES
from agentkv_kernels.implementation import Implementation, check_triton, choose
from agentkv_kernels.quantise import LARGEST, KVScales, quantise


def store_kv(
    key: Tensor,
    value: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    *,
    scales: KVScales | None = None,
    check_slots: bool | None = None,
    implementation: Implementation | None = None,
) -> None:
    """Writes one step's keys and values into their slots.

    Args:
        key: (num_rows, num_kv_heads, head_dim), the cache's dtype; a float for 8-bit caches.
        value: The same with v_cache's head_dim.
        k_cache: (num_blocks, block_size, num_kv_heads, head_dim), written in place.
        v_cache: The same, written in place.
        slots: (num_rows,) int64; -1 skips the row. Other rows' slots must be distinct.
        scales: Factors of 8-bit caches, written in place.
        check_slots: Whether slots are compared with the pool, which waits for the device that
            holds them. None: on a CPU only. A slot out of range that is not looked for writes
            into foreign memory.
        implementation: "triton", or "cpu" and "reference", which are the same here.

    Raises:
        ValueError: A shape, device or stride does not fit, or a slot lies outside of
            [-1, num_blocks * block_size).
        TypeError: A dtype does not fit.
    """
    checks.check_store(key, value, slots, k_cache, v_cache, scales)
    if slots.numel() == 0:
        return
    num_slots = k_cache.shape[0] * k_cache.shape[1]
    by_triton = choose(implementation, k_cache) == "triton"
    low = -1
    if check_slots or (check_slots is None and slots.device.type == "cpu"):
        low = checks.check_slots(slots, num_slots)
    if by_triton:
        check_triton(key, k_cache, v_cache, name="key")
        checks.check_unit_stride({"value": value, "slots": slots})
        from agentkv_kernels._triton import store_kv as kernel  # heavy: see `implementation`

        kernel.store_kv(key, value, k_cache, v_cache, slots, scales)
        return
    if low < 0:  # -1 would index the last slot
        kept = (slots >= 0).nonzero().flatten()
        slots, key, value = slots[kept], key[kept], value[kept]
    if scales is not None:
        key, k_factor = quantise(key, k_cache.dtype)
        value, v_factor = quantise(value, v_cache.dtype)
        _write(scales.k, slots, k_factor)
        _write(scales.v, slots, v_factor)
    _write(k_cache, slots, key)
    _write(v_cache, slots, value)


def copy_blocks(
    kv: Tensor,
    src: Sequence[int],
    dst: Sequence[int],
    num_tokens: Sequence[int],
    *,
    implementation: Implementation | None = None,
) -> None:
    """Copies the first num_tokens[i] slots of block src[i] to block dst[i], in every layer.

    The result is that of copies in the order given, so a block may be read by one copy and reused
    by a later one. Other slots of dst keep their content.

    Args:
        kv: (num_layers, 2, num_blocks, block_size, num_kv_heads, head_dim), written in place.
        src: Block ids to read.
        dst: Block ids to write; dst[i] differs from src[i].
        num_tokens: Slots per copy, in [0, block_size].
        implementation: "triton", or "cpu" and "reference", which are the same here.

    Raises:
        ValueError: The lists differ in length, or a number is out of its range. Nothing is copied.
    """
    checks.check_pool(kv)
    checks.check_copies(kv, src, dst, num_tokens)
    if choose(implementation, kv) == "triton":
        from agentkv_kernels._triton import compat  # heavy: see `implementation`
        from agentkv_kernels._triton import copy_blocks as kernel

        compat.check_device("kv", kv)
        checks.check_unit_stride({"kv": kv})
        pairs = map(kernel.Pair, src, dst, num_tokens)
        kernel.copy_blocks(kv, list(pairs))
        return
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
    """Allocates a pool in the storage layout the implementations read fastest.

    Its content is whatever the memory holds: no implementation lets a slot that nobody wrote
    influence a result, and writing every page of a large pool would cost its start seconds.

    Storage is token-major, (num_layers, 2, slots, num_kv_heads, head_dim): a run of consecutive
    block ids is one strided view, and a gathered token one contiguous row. The factors of an 8-bit
    pool are a float32 pool with a head_dim of 1.

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
    if dtype not in DTYPES and dtype not in LARGEST:
        raise TypeError(f"dtype must be one of {(*DTYPES, *LARGEST)}, not {dtype}")
    return torch.empty(shape, dtype=dtype, device=device)


def _write(cache: Tensor, slots: Tensor, new: Tensor) -> None:
    """Puts rows into checked slots of a cache."""
    if cache.dtype == torch.float8_e4m3fn:  # torch moves no such numbers on a CPU
        cache, new = cache.view(torch.uint8), new.view(torch.uint8)
    block_size = cache.shape[1]
    if cache.stride(0) == block_size * cache.stride(1):
        # The pool's own layout: slots are evenly spaced, which makes this 4x faster.
        cache.flatten(0, 1).index_copy_(0, slots, new)
    else:
        cache[slots // block_size, slots % block_size] = new
