"""Attention: what it takes, what it means, which implementation runs.

`checks` says what is refused, the implementations trust it. It knows nothing of contexts or models.
What moves KV is in `kv_ops`, and may be imported from here as well.

Shapes used throughout:

    query            (num_rows, num_q_heads, head_dim)
    k_cache, v_cache (num_blocks, block_size, num_kv_heads, head_dim), any strides
"""

from typing import TypedDict

import torch
from torch import Tensor

from agentkv_kernels import checks, cpu, cpu_native, reference
from agentkv_kernels.implementation import Implementation, check_triton, choose
from agentkv_kernels.kv_ops import allocate_kv, copy_blocks, store_kv
from agentkv_kernels.plan import AttentionPlan
from agentkv_kernels.quantise import KVScales, dequantise
from agentkv_kernels.work_buffers import WorkBuffers
from agentkv_kernels.work_options import WorkOptions

__all__ = [
    "Implementation",
    "allocate_kv",
    "copy_blocks",
    "store_and_attend",
    "store_kv",
    "tree_attention",
    "work_list_attention",
    "work_options",
]


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
    scales: KVScales | None = None,
    batch_invariant: bool = False,
    implementation: Implementation | None = None,
) -> Tensor:
    """Attends every row to the KV its runs let it see; AttentionPlan defines what that is.

    Nothing outside a row's visible positions influences it, NaN included; with "triton" a value
    that is not finite may reach rows that list the same run and do not see it. Query head h reads
    KV head h // (num_q_heads // num_kv_heads).

    Args:
        query: (num_rows, num_q_heads, head_dim).
        k_cache: (num_blocks, block_size, num_kv_heads, head_dim), one layer, any strides.
        v_cache: The same with its own head_dim.
        plan: Built for num_rows rows and this block_size.
        scale: Factor on q.k, before the softcap.
        window: Positions a row sees at most, itself included (q - k < window); None: all.
        softcap: Scores become softcap * tanh(score / softcap); None: unchanged.
        sinks: (num_q_heads,) logits added to each row's softmax denominator; None: nothing.
        scales: Factors of 8-bit caches; None where caches have the query's dtype.
        batch_invariant: A row's bits do not depend on the other rows. "cpu" cannot do that.
        implementation: "cpu" reads shared KV once, by the native kernel where there is one for
            this machine and these dtypes, else as "torch" does; "triton" does on a GPU (and in its
            interpreter); "reference" is the specification, slow, on any device. None: "cpu" for CPU
            tensors, "triton" on a GPU.

    Returns:
        (num_rows, num_q_heads, v_head_dim), contiguous, in the query's dtype. A row that sees
        nothing is zero.

    Raises:
        ValueError: A shape, size, device, stride or number does not fit.
        TypeError: A dtype is unsupported or differs between query and caches.
    """
    chosen = choose(implementation, query)
    if chosen == "cpu" and not batch_invariant and (calls := cpu_native.calls_of(plan)):
        modifiers = cpu_native.Modifiers(scale, window, softcap)
        out = calls.attend(query, k_cache, v_cache, modifiers, sinks, scales, None)
        if out is not None:
            return out
    checks.check_query(query, k_cache, v_cache, scales)
    checks.check_modifiers(query, window, softcap, sinks)
    if chosen == "triton":
        check_triton(query, k_cache, v_cache)
        options = work_options(
            query, k_cache, v_cache, window=window, batch_invariant=batch_invariant
        )
        buffers = plan.followed(WorkBuffers.of, options, query.device)
        _check_plan(query, k_cache, plan, buffers.work.highest_block)
        return _attend(query, k_cache, v_cache, buffers, scale, softcap, sinks, scales)
    _check_plan(query, k_cache, plan, plan.derived(AttentionPlan.highest_block))
    keywords = _Options(scale=scale, window=window, softcap=softcap, sinks=sinks)
    if chosen == "reference":
        if scales is not None:
            k_cache = dequantise(k_cache, scales.k, query.dtype)
            v_cache = dequantise(v_cache, scales.v, query.dtype)
        return reference.tree_attention(query, k_cache, v_cache, plan, **keywords)[0]
    if query.device.type != "cpu":
        raise ValueError(f"implementation {chosen!r} cannot run on {query.device}")
    if batch_invariant:
        raise ValueError("batch_invariant needs implementation 'triton' or 'reference'")
    return cpu.tree_attention(query, k_cache, v_cache, plan, scales=scales, **keywords)


def store_and_attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    plan: AttentionPlan,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    scales: KVScales | None = None,
    batch_invariant: bool = False,
    implementation: Implementation | None = None,
) -> Tensor:
    """Does what `store_kv` and then `tree_attention` do: all that one layer of a step needs.

    On a CPU with native kernels it is one call. Arguments, result and errors are theirs; with an
    error, nothing is stored that the plan's rows do not own.
    """
    if choose(implementation, query) == "cpu" and not batch_invariant and len(slots):
        calls = cpu_native.calls_of(plan)
        if calls is not None:
            modifiers = cpu_native.Modifiers(scale, window, softcap)
            new = cpu_native.NewKV(key, value, slots)
            out = calls.attend(query, k_cache, v_cache, modifiers, sinks, scales, new)
            if out is not None:
                return out
    store_kv(key, value, k_cache, v_cache, slots, scales=scales, implementation=implementation)
    return tree_attention(
        query,
        k_cache,
        v_cache,
        plan,
        scale=scale,
        window=window,
        softcap=softcap,
        sinks=sinks,
        scales=scales,
        batch_invariant=batch_invariant,
        implementation=implementation,
    )


def work_list_attention(
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    buffers: WorkBuffers,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    scales: KVScales | None = None,
) -> Tensor:
    """Does what `tree_attention` does, for a work list that the caller keeps: by Triton only.

    The form for CUDA graphs: it reads nothing of the host but the buckets of the list, so that a
    captured call may be replayed after each `buffers.load` of a list with the same buckets. A
    window is part of `buffers.options`. Other arguments as in `tree_attention`.

    Raises:
        ValueError: A shape, device, stride or number does not fit, or the list is for other sizes.
        TypeError: A dtype is unsupported or differs between query and caches.
    """
    checks.check_query(query, k_cache, v_cache, scales)
    checks.check_modifiers(query, None, softcap, sinks)
    check_triton(query, k_cache, v_cache)
    options = buffers.options
    fits = work_options(
        query, k_cache, v_cache, window=options.window, batch_invariant=options.batch_invariant
    )
    if options[:5] != fits[:5]:
        raise ValueError(f"buffers are for sizes {options[:5]}, the tensors have {fits[:5]}")
    checks.check_plan(
        query,
        k_cache,
        num_rows=buffers.work.num_rows,
        block_size=buffers.work.block_size,
        highest_block=buffers.work.highest_block,
    )
    return _attend(query, k_cache, v_cache, buffers, scale, softcap, sinks, scales)


def work_options(
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    window: int | None = None,
    batch_invariant: bool = False,
) -> WorkOptions:
    """Returns how work is cut for tensors like these; only shapes, dtypes and the device count."""
    num_programs = 264
    if query.is_cuda:
        num_programs = 2 * torch.cuda.get_device_properties(query.device).multi_processor_count
    return WorkOptions(
        num_q_heads=query.shape[1],
        num_kv_heads=k_cache.shape[2],
        head_dim=query.shape[2],
        v_head_dim=v_cache.shape[3],
        kv_item_bytes=k_cache.element_size(),
        window=window,
        num_programs=num_programs,
        batch_invariant=batch_invariant,
    )


def _check_plan(query: Tensor, k_cache: Tensor, plan: AttentionPlan, highest_block: int) -> None:
    checks.check_plan(
        query,
        k_cache,
        num_rows=plan.num_rows,
        block_size=plan.block_size,
        highest_block=highest_block,
    )


def _attend(
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    buffers: WorkBuffers,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
    scales: KVScales | None,
) -> Tensor:
    from agentkv_kernels._triton import attention, tree_attention  # heavy: see `implementation`

    score = tree_attention.Score(scale, softcap, sinks)
    return attention.attend(query, k_cache, v_cache, buffers, score, scales)
