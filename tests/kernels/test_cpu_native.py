"""What the CPU kernels do besides attention itself: storing, 8-bit pools, refusing, threads."""

import pytest
import torch
from kernel_trees import Tree, chunk_tree, decode_tree, make_inputs, norm_error, random_tree
from torch import Tensor

from agentkv_kernels import (
    AttentionPlan,
    KVRun,
    KVScales,
    RunGrowth,
    allocate_kv,
    cpu_native,
    store_and_attend,
    store_kv,
    tree_attention,
)
from agentkv_kernels.quantise import quantise

pytestmark = pytest.mark.usefixtures("cpu_kernels")
BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 8e-3}


def own_slots(tree: Tree) -> Tensor:
    """The slot of each row's own position, -1 where no run holds it."""
    slots = []
    for row, kv_len in enumerate(tree.kv_lens):
        runs = [run for run in tree.runs if row in run.rows and run.start < kv_len <= run.end]
        slots.append(tree.slot(runs[0], kv_len - 1) if runs else -1)
    taken = [slot if slot not in slots[:row] else -1 for row, slot in enumerate(slots)]
    return torch.tensor(taken)


@pytest.mark.parametrize("dtype", BOUNDS)
def test_storing_and_attending_is_both(dtype: torch.dtype) -> None:
    """Catches KV stored after it is read, at a wrong slot, or where -1 says nowhere."""
    trees = [random_tree(seed, num_rows=14, max_len=60) for seed in range(4)]
    for tree in [*trees, decode_tree(16, 300, 20), chunk_tree((70, 64), (40, 3))]:
        inputs = make_inputs(tree, dtype=dtype)
        new = torch.randn(2, len(tree.kv_lens), 2, 16).to(dtype)
        slots = own_slots(tree)
        expected_k, expected_v = inputs.k_cache.clone(), inputs.v_cache.clone()
        store_kv(new[0], new[1], expected_k, expected_v, slots)
        plan, scale = tree.plan(), inputs.scale
        expected = tree_attention(
            inputs.query, expected_k, expected_v, plan, scale=scale, implementation="reference"
        )
        caches = inputs.k_cache, inputs.v_cache
        got = store_and_attend(inputs.query, new[0], new[1], *caches, slots, plan, scale=scale)
        assert norm_error(got, expected) < BOUNDS[dtype]
        torch.testing.assert_close(inputs.k_cache, expected_k, rtol=0, atol=0, equal_nan=True)
        torch.testing.assert_close(inputs.v_cache, expected_v, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("stored", [torch.int8, torch.float8_e4m3fn])
def test_8_bit_pools(stored: torch.dtype, dtype: torch.dtype) -> None:
    """Catches a factor of another token or head, and another rounding than `quantise` has."""
    for tree in (decode_tree(6, 300, 20), chunk_tree((70, 64), (9, 3)), random_tree(5)):
        inputs = make_inputs(tree, dtype=dtype, poison=0.0)
        pool = allocate_kv(1, tree.num_blocks, tree.block_size, 2, 16, dtype=stored, device="cpu")
        factors = torch.full((2, tree.num_blocks, tree.block_size, 2), torch.nan)
        scales = KVScales(factors[0], factors[1])
        slots = torch.arange(tree.num_blocks * tree.block_size)
        old = inputs.k_cache.flatten(0, 1), inputs.v_cache.flatten(0, 1)
        store_kv(*old, pool[0, 0], pool[0, 1], slots, scales=scales)
        new = torch.randn(2, len(tree.kv_lens), 2, 16).to(dtype)
        tensors = (inputs.query, new[0], new[1], pool[0, 0], pool[0, 1], own_slots(tree))
        got = store_and_attend(*tensors, tree.plan(), scale=0.3, scales=scales)
        expected = tree_attention(
            inputs.query,
            pool[0, 0],
            pool[0, 1],
            tree.plan(),
            scale=0.3,
            scales=scales,
            implementation="reference",
        )
        assert norm_error(got, expected) < 8e-3
        for row, slot in enumerate(own_slots(tree).tolist()):
            if slot >= 0:
                stored_rows, factor = quantise(new[0, row], stored)
                assert torch.equal(pool[0, 0].flatten(0, 1)[slot], stored_rows)
                torch.testing.assert_close(scales.k.flatten(0, 1)[slot], factor, rtol=1e-6, atol=0)


def test_the_kernel_takes_what_it_is_for(cpu_kernels: str) -> None:
    """Catches a kernel that quietly leaves everything to torch."""
    tree = decode_tree(3, 40, 5)
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        inputs = make_inputs(tree, dtype=dtype)
        calls = cpu_native.calls_of(tree.plan())
        assert (calls is None) == (cpu_kernels == "torch")
        if calls is not None:
            caches, modifiers = (inputs.k_cache, inputs.v_cache), cpu_native.Modifiers(0.5)
            out = calls.attend(inputs.query, *caches, modifiers, None, None, None)
            assert (out is None) == (dtype == torch.float64)


@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_threads_change_nothing_but_the_time(num_threads: int) -> None:
    """Catches two threads with one scratch, and a piece that is lost where work is split."""
    for tree in (decode_tree(1, 0, 3000), decode_tree(6, 2000, 20), chunk_tree((90, 80))):
        inputs = make_inputs(tree)
        caches = (inputs.k_cache, inputs.v_cache)
        # Alone: the specification calls torch for each row, and shall not wait for threads.
        expected = tree_attention(
            inputs.query, *caches, tree.plan(), scale=0.3, implementation="reference"
        )
        before = torch.get_num_threads()
        torch.set_num_threads(num_threads)
        try:
            again = [
                tree_attention(inputs.query, *caches, tree.plan(), scale=0.3) for _ in range(3)
            ]
        finally:
            torch.set_num_threads(before)
        assert norm_error(again[0], expected) < 1e-5
        assert torch.equal(again[1], again[0])
        assert torch.equal(again[2], again[0])


@pytest.mark.parametrize(
    ("head_dim", "v_head_dim"), [(8, 8), (20, 40), (64, 64), (80, 80), (256, 128)]
)
def test_head_dims(head_dim: int, v_head_dim: int) -> None:
    """Catches heads that do not fill whole vectors, or that need several tiles of registers."""
    for tree in (decode_tree(3, 90, 7), random_tree(3), decode_tree(1, 0, 70)):
        inputs = make_inputs(tree, head_dim=head_dim, v_head_dim=v_head_dim)
        caches, plan = (inputs.k_cache, inputs.v_cache), tree.plan()
        got = tree_attention(inputs.query, *caches, plan, scale=0.2)
        expected = tree_attention(
            inputs.query, *caches, plan, scale=0.2, implementation="reference"
        )
        assert norm_error(got, expected) < 1e-5


def test_a_plan_that_moves_on_is_cut_anew() -> None:
    """Catches lengths or block ids of the step before, and a later step's refusals forgotten."""
    pool = torch.randn(2, 8, 4, 2, 16)
    query = torch.randn(1, 6, 16)
    plan = AttentionPlan.build([KVRun(0, 3, [2], [0])], [3], block_size=4)
    for end in range(4, 17):
        # Positions 4, 8 and 12 begin the blocks 7, 0 and 4.
        added = [(7, 0, 4)[end // 4 - 1]] if end % 4 == 1 else []
        plan.advance([end], [RunGrowth(0, end, added)])
        got = tree_attention(query, pool[0], pool[1], plan, scale=0.5)
        expected = tree_attention(
            query, pool[0], pool[1], plan, scale=0.5, implementation="reference"
        )
        assert norm_error(got, expected) < 1e-5
    plan.advance([17], [RunGrowth(0, 17, [8])])
    with pytest.raises(ValueError, match="plan reads block 8"):
        tree_attention(query, pool[0], pool[1], plan, scale=0.5)


def test_slots_outside_of_the_pool_are_refused() -> None:
    """Catches a write into foreign memory; nothing is stored."""
    pool = torch.zeros(2, 2, 4, 2, 16)
    new, query = torch.ones(2, 2, 16), torch.ones(2, 6, 16)
    plan = AttentionPlan.build([KVRun(0, 2, [0], [0, 1])], [1, 2], block_size=4)
    for slots in ([0, 8], [-2, 1]):
        with pytest.raises(ValueError, match="slots must lie in"):
            store_and_attend(
                query, new, new, pool[0], pool[1], torch.tensor(slots), plan, scale=1.0
            )
        assert not pool.any()
    with pytest.raises(ValueError, match="key must have shape"):
        store_and_attend(
            query, new[:1], new, pool[0], pool[1], torch.tensor([0, 1]), plan, scale=1.0
        )
