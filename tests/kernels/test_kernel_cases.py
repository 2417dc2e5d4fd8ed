"""Cases of the case log that live in the kernels, each for every implementation."""

import math
from typing import Literal

import pytest
import torch
from kernel_trees import Tree, make_inputs

from agentkv_kernels import AttentionPlan, KVRun, allocate_kv, store_kv, tree_attention

Implementation = Literal["reference", "cpu", "torch"]
IMPLEMENTATIONS = pytest.mark.parametrize("implementation", ["reference", "cpu", "torch"])


def attend(tree: Tree, implementation: Implementation, *, poison: float = math.nan) -> torch.Tensor:
    inputs = make_inputs(tree, poison=poison)
    return tree_attention(
        inputs.query,
        inputs.k_cache,
        inputs.v_cache,
        tree.plan(),
        scale=inputs.scale,
        implementation=implementation,
    )


@IMPLEMENTATIONS
def test_case_079_unwritten_slots_do_not_poison(implementation: Implementation) -> None:
    """Catches 0 x NaN: whatever unwritten slots hold, the bits are those of a zeroed pool."""
    runs = (
        KVRun(0, 17, (3, 1), (0,)),  # 17 tokens at 16 a block
        KVRun(0, 3, (6,), (1,)),
        KVRun(0, 9, (0,), range(2, 4)),  # forked inside a block, each with a block of its own
        KVRun(9, 12, (5,), (2,)),
        KVRun(9, 20, (2, 4), (3,)),
        KVRun(0, 60, (7, 8, 9, 12), range(4, 54)),  # a chunk of 50 new tokens
    )
    tree = Tree(16, 13, runs, (17, 3, 12, 20, *range(11, 61)))
    expected = attend(tree, implementation, poison=0.0)
    assert expected.isfinite().all()
    for poison in (math.nan, math.inf, 1e30):
        assert torch.equal(attend(tree, implementation, poison=poison), expected)


@IMPLEMENTATIONS
@pytest.mark.parametrize(("num_rows", "padded_to"), [(3, 4), (5, 8)])
def test_case_080_padding_rows_write_nothing(
    num_rows: int, padded_to: int, implementation: Implementation
) -> None:
    """Catches id -1 wrapping to the last slot: the first and last block are live and full."""
    generator = torch.Generator().manual_seed(0)
    kv = allocate_kv(1, 8, 4, 2, 16, dtype=torch.float32, device="cpu")
    kv.normal_(generator=generator)
    before = kv.clone()
    key = torch.randn(padded_to, 2, 16, generator=generator)
    query = torch.randn(padded_to, 4, 16, generator=generator)
    slots = torch.full((padded_to,), -1)
    slots[:num_rows] = torch.arange(4, 4 + num_rows)
    store_kv(key, key, kv[0, 0], kv[0, 1], slots)
    assert torch.equal(kv[:, :, [0, 7]], before[:, :, [0, 7]])
    # Row 0 reads the last block, row 1 the first, the others new tokens; padding reads nothing.
    runs = [KVRun(0, 4, [7], [0]), KVRun(0, 4, [0], [1]), KVRun(0, 4, [1], range(2, num_rows))]
    kv_lens = [4] * num_rows
    outs = [
        tree_attention(
            query[:count],
            kv[0, 0],
            kv[0, 1],
            AttentionPlan.build(runs, kv_lens + [0] * (count - num_rows), block_size=4),
            scale=0.25,
            implementation=implementation,
        )
        for count in (num_rows, padded_to)
    ]
    torch.testing.assert_close(outs[1][:num_rows], outs[0], rtol=1e-6, atol=1e-6)
    assert not outs[1][num_rows:].any()


@IMPLEMENTATIONS
def test_case_083_stale_ids_past_the_end_are_not_read(implementation: Implementation) -> None:
    """Catches leftovers of an earlier, longer block table being followed."""
    table = (5, 2, 0, 7, 4, 6)  # of a context with 90 tokens, 16 a block
    other = KVRun(0, 90, (1, 3, 8, 9, 10, 11), (1,))
    outs = []
    for stale in (table[2:], other.block_ids[2:], (2**31 - 1,) * 4):
        tree = Tree(16, 12, (KVRun(0, 17, (*table[:2], *stale), (0,)), other), (17, 90))
        outs.append(attend(tree, implementation))
    assert outs[0].isfinite().all()
    assert torch.equal(outs[1], outs[0])
    assert torch.equal(outs[2], outs[0])


@IMPLEMENTATIONS
def test_case_086_every_batch_width(implementation: Implementation) -> None:
    """Catches a width of the batch at which rows get each other's results."""
    runs, head = [], 0
    for row in range(33):  # distinct contexts, row r of length r + 1
        needed = row // 4 + 1
        runs.append(KVRun(0, row + 1, range(head, head + needed), (row,)))
        head += needed
    everything = Tree(4, head, tuple(runs), tuple(range(1, 34)))
    inputs = make_inputs(everything)

    def attend_rows(first: int, last: int) -> torch.Tensor:
        chosen = [run._replace(rows=(run.rows[0] - first,)) for run in runs[first:last]]
        plan = AttentionPlan.build(chosen, everything.kv_lens[first:last], block_size=4)
        return tree_attention(
            inputs.query[first:last],
            inputs.k_cache,
            inputs.v_cache,
            plan,
            scale=inputs.scale,
            implementation=implementation,
        )

    solo = torch.cat([attend_rows(row, row + 1) for row in range(33)])
    for width in range(1, 34):
        torch.testing.assert_close(attend_rows(0, width), solo[:width], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(
            attend_rows(33 - width, 33), solo[33 - width :], rtol=1e-5, atol=1e-6
        )
