"""Runs the Triton kernels on random trees, with everything nobody wrote made NaN."""

import math
from typing import Any

import torch
from kernel_trees import Inputs, Tree, norm_error
from torch import Tensor

from agentkv_kernels import AttentionPlan, WorkBuffers, WorkOptions, reference, work_options
from agentkv_kernels._triton.attention import attend
from agentkv_kernels._triton.tree_attention import Partials, Score

CPU = torch.device("cpu")
BOUNDS = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}
"""Relative errors in the norm that are rounding and nothing else."""


def poisoned_partials(buffers: WorkBuffers, num_q_heads: int, v_head_dim: int) -> Partials:
    partials = Partials.empty(buffers.buckets.partials, num_q_heads, v_head_dim, CPU)
    partials.out.fill_(math.nan)
    partials.lse.fill_(math.nan)
    return partials


def options_for(inputs: Inputs, **chosen: Any) -> WorkOptions:
    """The options of `ops`, some of them chosen; pieces are short, so that there are several."""
    options = work_options(inputs.query, inputs.k_cache, inputs.v_cache)
    return options._replace(**{"split_tokens": 64, **chosen})


def run(
    plan: AttentionPlan,
    inputs: Inputs,
    options: WorkOptions,
    *,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attends by the kernels, into poisoned buffers."""
    return run_buffers(WorkBuffers.of(plan, options, CPU), inputs, softcap=softcap, sinks=sinks)


def run_buffers(
    buffers: WorkBuffers,
    inputs: Inputs,
    *,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """The same for a work list that is kept."""
    num_rows, num_q_heads, _ = inputs.query.shape
    v_head_dim = inputs.v_cache.shape[3]
    return attend(
        inputs.query,
        inputs.k_cache,
        inputs.v_cache,
        buffers,
        Score(inputs.scale, softcap, sinks),
        out=inputs.query.new_full((num_rows, num_q_heads, v_head_dim), math.nan),
        partials=poisoned_partials(buffers, num_q_heads, v_head_dim),
    )


def check(
    tree: Tree,
    inputs: Inputs,
    options: WorkOptions,
    *,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> None:
    """Asserts that the kernels say what the specification says."""
    plan = tree.plan()
    got = run(plan, inputs, options, softcap=softcap, sinks=sinks)
    tensors = (inputs.query.double(), inputs.k_cache.double(), inputs.v_cache.double())
    exact = Inputs(*tensors, inputs.scale)
    expected, _ = reference.tree_attention(
        exact.query,
        exact.k_cache,
        exact.v_cache,
        plan,
        scale=exact.scale,
        window=options.window,
        softcap=softcap,
        sinks=None if sinks is None else sinks.double(),
    )
    assert norm_error(got, expected) < BOUNDS[inputs.query.dtype]
