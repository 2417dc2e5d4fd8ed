"""The specification against softmax written once more, from the definition and in float64."""

import math

import pytest
import torch
from kernel_trees import Inputs, Tree, make_inputs, norm_error, random_tree
from torch import Tensor

from agentkv_kernels import AttentionPlan, KVRun, reference


def dense_row(
    tree: Tree,
    inputs: Inputs,
    row: int,
    *,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """One row by the textbook: (num_q_heads, v_head_dim) and (num_q_heads,), float64."""
    slots = tree.visible_slots(row, window)
    keys = inputs.k_cache.flatten(0, 1)[slots].double()
    values = inputs.v_cache.flatten(0, 1)[slots].double()
    num_q_heads = inputs.query.shape[1]
    outs, lses = [], []
    for head in range(num_q_heads):
        kv_head = head // (num_q_heads // keys.shape[1])
        scores = keys[:, kv_head] @ inputs.query[row, head].double() * inputs.scale
        if softcap is not None:
            scores = softcap * (scores / softcap).tanh()
        total = scores.exp().sum()
        if sinks is not None:
            total = total + sinks[head].double().exp()
        outs.append(
            (scores.exp()[:, None] * values[:, kv_head]).sum(0) / total
            if float(total)
            else torch.zeros(values.shape[2], dtype=torch.float64)
        )
        lses.append(total.log())
    return torch.stack(outs), torch.stack(lses)


@pytest.mark.parametrize(
    ("window", "softcap", "with_sinks"),
    [(None, None, False), (9, None, False), (None, 2.0, False), (None, None, True), (5, 3.0, True)],
)
@pytest.mark.parametrize("seed", range(4))
def test_reference_is_softmax(
    seed: int, window: int | None, softcap: float | None, with_sinks: bool
) -> None:
    """Catches any wrong slot, bound, head or denominator in the specification itself."""
    tree = random_tree(seed, num_rows=9, max_len=14)
    inputs = make_inputs(tree, dtype=torch.float64, window=window, head_dim=8, v_head_dim=5)
    sinks = torch.linspace(-2, 2, 6, dtype=torch.float64) if with_sinks else None
    out, lse = reference.tree_attention(
        inputs.query,
        inputs.k_cache,
        inputs.v_cache,
        tree.plan(),
        scale=inputs.scale,
        window=window,
        softcap=softcap,
        sinks=sinks,
    )
    for row in range(len(tree.kv_lens)):
        expected = dense_row(tree, inputs, row, window=window, softcap=softcap, sinks=sinks)
        torch.testing.assert_close(out[row], expected[0], rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(lse[row], expected[1], rtol=1e-12, atol=1e-12)


def test_row_that_sees_nothing() -> None:
    """Catches 0/0: such a row gives zeros, and the sink (or nothing) as its denominator."""
    plan = AttentionPlan.build([KVRun(4, 8, [1], range(1))], [3, 0], block_size=4)
    cache = torch.full((2, 4, 1, 8), math.nan)
    query = torch.ones(2, 2, 8)
    out, lse = reference.tree_attention(query, cache, cache, plan, scale=1.0)
    assert torch.equal(out, torch.zeros(2, 2, 8))
    assert torch.equal(lse, torch.full((2, 2), -math.inf))
    sinks = torch.tensor([0.5, -1.0])
    out, lse = reference.tree_attention(query, cache, cache, plan, scale=1.0, sinks=sinks)
    assert torch.equal(out, torch.zeros(2, 2, 8))
    assert torch.equal(lse, sinks.expand(2, 2))


@pytest.mark.parametrize(
    ("dtype", "bound"), [(torch.float32, 1e-6), (torch.float16, 1e-3), (torch.bfloat16, 8e-3)]
)
def test_reference_keeps_the_dtype(dtype: torch.dtype, bound: float) -> None:
    """Catches half precision leaking into the sums, and outputs of another type."""
    tree = random_tree(3)
    inputs = make_inputs(tree, dtype=dtype)
    exact = reference.tree_attention(
        inputs.query.double(),
        inputs.k_cache.double(),
        inputs.v_cache.double(),
        tree.plan(),
        scale=inputs.scale,
    )
    out, lse = reference.tree_attention(
        inputs.query, inputs.k_cache, inputs.v_cache, tree.plan(), scale=inputs.scale
    )
    assert out.dtype == dtype
    assert lse.dtype == torch.float32
    assert norm_error(out, exact[0]) < bound
    seen = exact[1].isfinite()
    torch.testing.assert_close(lse[seen].double(), exact[1][seen], rtol=1e-5, atol=1e-5)
