"""A work list over many steps, and batch-invariant mode: the Triton kernels in the interpreter."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from interpreted_kernels import CPU, options_for, run, run_buffers
from kernel_trees import Inputs, Tree, decode_tree, make_inputs, norm_error, random_tree

from agentkv_kernels import AttentionPlan, Capacity, KVRun, RunGrowth, WorkBuffers, reference
from agentkv_kernels.ops import tree_attention

PREFIX, ROWS = 70, 4


def grown_to(tree: Tree, ends: list[int]) -> list[KVRun]:
    """The runs of a decode tree when its rows have come to `ends`, with just the blocks needed."""
    runs = [tree.runs[0]]
    for run_, end in zip(tree.runs[1:], ends, strict=True):
        needed = -(-end // 16) - run_.start // 16
        runs.append(run_._replace(end=end, block_ids=run_.block_ids[:needed]))
    return runs


def expected_of(tree: Tree, inputs: Inputs, ends: list[int]) -> torch.Tensor:
    plan = AttentionPlan.build(grown_to(tree, ends), ends, block_size=16)
    out, _ = reference.tree_attention(
        inputs.query, inputs.k_cache, inputs.v_cache, plan, scale=inputs.scale
    )
    return out


def test_advancing_equals_planning_anew() -> None:
    """Catches a tail that stops growing, or ids of new blocks that never reach the device."""
    tree = decode_tree(ROWS, PREFIX, 60)
    inputs = make_inputs(tree, num_kv_heads=1)
    ends = [PREFIX + 1] * ROWS
    runs = grown_to(tree, ends)
    plan = AttentionPlan.build(runs, ends, block_size=16)
    for step in range(1, 60):
        wanted = [PREFIX + 1 + (step if row < 2 else step // 2) for row in range(ROWS)]
        after = grown_to(tree, wanted)
        grown = [
            RunGrowth(index, new.end, new.block_ids[len(old.block_ids) :])
            for index, (old, new) in enumerate(zip(runs, after, strict=True))
            if new.end > old.end
        ]
        plan.advance(wanted, grown)
        runs = after
        if step % 7 == 0 or step == 59:  # every step is followed, some are computed
            got = tree_attention(
                inputs.query,
                inputs.k_cache,
                inputs.v_cache,
                plan,
                scale=inputs.scale,
                implementation="triton",
            )
            assert norm_error(got, expected_of(tree, inputs, wanted)) < 1e-5
    assert len(plan._followers) == 1
    (buffers,) = plan._followers.values()
    assert buffers.work.num_partials == 0 or buffers.work.kv_lens.tolist() == wanted


def test_the_device_moves_on_alone() -> None:
    """Catches a decode step that needs the host: lengths grow where the kernel reads them."""
    tree = decode_tree(ROWS, PREFIX, 30)
    inputs = make_inputs(tree, num_kv_heads=1)
    ends = [PREFIX + 5] * ROWS
    plan = AttentionPlan.build(grown_to(tree, ends), ends, block_size=16)
    buffers = WorkBuffers.of(plan, options_for(inputs, sharing="all"), CPU)
    for step in range(1, 4):
        buffers.advance_on_device()
        got = run_buffers(buffers, inputs)
        assert norm_error(got, expected_of(tree, inputs, [PREFIX + 5 + step] * ROWS)) < 1e-5


def test_one_set_of_buffers_serves_many_plans() -> None:
    """Catches leftovers of a longer list, which a captured graph would go on reading."""
    trees = [random_tree(seed, num_rows=8, max_len=70) for seed in range(4)]
    num_rows = max(len(tree.kv_lens) for tree in trees)
    buffers: WorkBuffers | None = None
    for tree in (*trees, trees[0]):
        padding = [0] * (num_rows - len(tree.kv_lens))
        plan = AttentionPlan.build(tree.runs, [*tree.kv_lens, *padding], block_size=4)
        inputs = make_inputs(tree, num_kv_heads=1)
        padded = torch.cat((inputs.query, torch.ones(len(padding), 3, 16)))
        inputs = Inputs(padded, inputs.k_cache, inputs.v_cache, inputs.scale)
        if buffers is None:
            capacity = Capacity(num_rows, 64, 64, 256, 1024, 256)
            buffers = WorkBuffers(options_for(inputs), capacity, CPU)
        address = buffers.part("counts").data_ptr()
        assert buffers.load(plan)
        assert buffers.part("counts").data_ptr() == address
        got = run_buffers(buffers, inputs)
        expected, _ = reference.tree_attention(
            inputs.query, inputs.k_cache, inputs.v_cache, plan, scale=inputs.scale
        )
        assert norm_error(got, expected) < 1e-5


# Batch-invariant mode. BLAS, by which the interpreter multiplies, does not treat all rows of a
# matrix alike; the device does, and so does this product.


@pytest.fixture
def rows_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    def multiply(a: Any, b: Any, **_: Any) -> Any:
        return np.einsum("ik,kj->ij", a, b)

    monkeypatch.setattr(np, "matmul", multiply)


def invariant(inputs: Inputs, plan: AttentionPlan, **options: Any) -> torch.Tensor:
    return run(plan, inputs, options_for(inputs, batch_invariant=True, **options))


def alone(tree: Tree, row: int) -> AttentionPlan:
    """A plan for one row, with all its KV in one run of its own where blocks allow it."""
    mine = [run_._replace(rows=(0,)) for run_ in tree.runs if row in run_.rows]
    return AttentionPlan.build(mine, [tree.kv_lens[row]], block_size=tree.block_size)


@pytest.mark.usefixtures("rows_alike")
@pytest.mark.parametrize("window", [None, 100])
def test_siblings_change_no_bit(window: int | None) -> None:
    """Catches a row's result that depends on which other rows there are, or on where it forked."""
    blocks = range(100)
    runs = (
        KVRun(0, 150, blocks[:38], range(4)),  # forked inside a block and inside a piece
        KVRun(150, 290, (37, *blocks[38:73]), (0, 1)),
        KVRun(290, 300, blocks[72:75], (0,)),
        KVRun(290, 291, (72,), (1,)),
        KVRun(150, 152, (37,), (2,)),
        KVRun(150, 192, (37, *blocks[75:85]), (3,)),
    )
    tree = Tree(4, 100, runs, (300, 291, 152, 192))
    inputs = make_inputs(tree, num_kv_heads=1, poison=0.5)
    together = invariant(inputs, tree.plan(), window=window)
    for row in range(4):
        own = Inputs(inputs.query[row : row + 1], inputs.k_cache, inputs.v_cache, inputs.scale)
        assert torch.equal(invariant(own, alone(tree, row), window=window)[0], together[row])
    expected, _ = reference.tree_attention(
        inputs.query, inputs.k_cache, inputs.v_cache, tree.plan(), scale=inputs.scale, window=window
    )
    assert norm_error(together, expected) < 1e-5


@pytest.mark.usefixtures("rows_alike")
def test_steps_change_no_bit() -> None:
    """Catches a work list that moved on and one made anew that cut the same row differently."""
    tree = decode_tree(3, 60, 80)
    inputs = make_inputs(tree, num_kv_heads=1)
    options = options_for(inputs, batch_invariant=True)
    ends = [62, 62, 62]
    plan = AttentionPlan.build(grown_to(tree, ends), ends, block_size=16)
    buffers = WorkBuffers(options, Capacity(16, 16, 16, 16, 64, 64), CPU)
    assert buffers.load(plan)
    runs = grown_to(tree, ends)
    for end in (63, 64, 65, 90, 128, 130, 140):
        wanted = [end] * 3
        after = grown_to(tree, wanted)
        plan.advance(
            wanted,
            [
                RunGrowth(index, new.end, new.block_ids[len(old.block_ids) :])
                for index, (old, new) in enumerate(zip(runs, after, strict=True))
                if index
            ],
        )
        runs = after
        assert buffers.load(plan)
        moved_on = run_buffers(buffers, inputs)
        anew = AttentionPlan.build(after, wanted, block_size=16)
        assert torch.equal(moved_on, run(anew, inputs, options))


def test_the_public_options_reach_the_kernel() -> None:
    """Catches batch_invariant accepted and dropped."""
    tree = decode_tree(2, 40, 3)
    inputs = make_inputs(tree, num_kv_heads=1)
    plan = tree.plan()
    attend: Callable[..., torch.Tensor] = tree_attention
    for flag in (False, True):
        attend(
            inputs.query,
            inputs.k_cache,
            inputs.v_cache,
            plan,
            scale=inputs.scale,
            implementation="triton",
            batch_invariant=flag,
        )
    kept = [buffers.options.batch_invariant for buffers in plan._followers.values()]
    assert kept == [False, True]
