"""The Triton kernels against the specification, in the interpreter, on random trees."""

import itertools
import math
import random

import pytest
import torch
from interpreted_kernels import BOUNDS, CPU, check, options_for, poisoned_partials, run
from kernel_trees import (
    Inputs,
    Tree,
    chunk_tree,
    decode_tree,
    make_inputs,
    norm_error,
    random_tree,
)

from agentkv_kernels import AttentionPlan, KVRun, WorkBuffers, reference, tree_attention
from agentkv_kernels._triton.tree_attention import Score, attend_items
from agentkv_kernels.work_options import Sharing

SHARING: tuple[Sharing, ...] = ("cost", "all", "none")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
GROUPS = (1, 2, 3, 4, 5, 7, 8, 16)


@pytest.mark.parametrize("seed", range(12))
def test_random_trees(seed: int) -> None:
    """Catches a wrong bound, mask or merge for forks and lengths of every kind."""
    block_size, group = (4, 16)[seed % 2], GROUPS[seed % len(GROUPS)]
    tree = random_tree(seed, block_size=block_size, num_rows=1 + seed, max_len=100)
    inputs = make_inputs(tree, num_kv_heads=1, group=group, dtype=DTYPES[seed % 3])
    check(tree, inputs, options_for(inputs, sharing=SHARING[seed // 3 % 3]))


@pytest.mark.parametrize("group", [*GROUPS, 32, 71])
def test_every_group_size(group: int) -> None:
    """Catches heads and rows packed into each other's places."""
    tree = decode_tree(4, 70, 9)
    inputs = make_inputs(tree, num_kv_heads=2 if group == 3 else 1, group=group)
    check(tree, inputs, options_for(inputs, sharing="all"))


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_head_dim(head_dim: int, dtype: torch.dtype) -> None:
    """Catches numbers beside a head that is no power of two."""
    tree = random_tree(3, num_rows=4, max_len=40)
    inputs = make_inputs(tree, num_kv_heads=1, group=2, head_dim=head_dim, dtype=dtype)
    check(tree, inputs, options_for(inputs))


def test_values_of_another_size() -> None:
    """Catches K's head size used for V."""
    tree = random_tree(5, num_rows=5)
    inputs = make_inputs(tree, num_kv_heads=1, head_dim=48, v_head_dim=16)
    check(tree, inputs, options_for(inputs, sharing="all"))


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("window", [1, 9, 50])
def test_windows(seed: int, window: int) -> None:
    """Catches a window that is off by one, or what lies between two windows being loaded."""
    tree = random_tree(seed, num_rows=6, max_len=60)
    inputs = make_inputs(tree, num_kv_heads=1, window=window)
    options = options_for(inputs, window=window, sharing=SHARING[seed % 3])
    sinks = torch.linspace(-1, 2, 3) if seed % 2 else None
    check(tree, inputs, options, softcap=1.5 if seed > 3 else None, sinks=sinks)


@pytest.mark.parametrize("sharing", SHARING)
@pytest.mark.parametrize("dtype", DTYPES)
def test_softcap_and_sinks(sharing: Sharing, dtype: torch.dtype) -> None:
    """Catches a sink counted per partial, or left out where a row has one item only."""
    tree = random_tree(8, num_rows=7)
    inputs = make_inputs(tree, num_kv_heads=2, group=2, dtype=dtype)
    sinks = torch.tensor([3.0, -1.0, 0.0, 6.0]).to(dtype)
    check(tree, inputs, options_for(inputs, sharing=sharing), softcap=2.0, sinks=sinks)
    check(tree, inputs, options_for(inputs, sharing=sharing), sinks=sinks)


def test_a_chunk_is_causal() -> None:
    """Catches new tokens that see later ones; the chunk spans several tiles and pieces."""
    tree = chunk_tree((90, 80), (30, 30), prefix=70)
    inputs = make_inputs(tree, num_kv_heads=1, group=2)
    check(tree, inputs, options_for(inputs))
    windowed = make_inputs(tree, num_kv_heads=1, group=2, window=40)
    check(tree, windowed, options_for(windowed, window=40))


def test_many_rows() -> None:
    """Catches a tile's rows cut off, or a merge list out of step, where there are many."""
    tree = random_tree(2, num_rows=200, max_len=30)
    inputs = make_inputs(tree, num_kv_heads=1, group=1)
    check(tree, inputs, options_for(inputs, sharing="all"))


def test_log_sum_exp_of_partials() -> None:
    """Catches a natural logarithm taken for one in base 2, which a single partial hides."""
    tree = decode_tree(3, 150, 20)
    inputs = make_inputs(tree, num_kv_heads=1)
    buffers = WorkBuffers.of(tree.plan(), options_for(inputs, sharing="all"), CPU)
    partials = poisoned_partials(buffers, 3, 16)
    tensors = (inputs.query, inputs.k_cache, inputs.v_cache)
    out = torch.empty_like(inputs.query)
    attend_items(*tensors, buffers, Score(inputs.scale, None, None), None, out, partials)
    _, expected = reference.tree_attention(*tensors, tree.plan(), scale=inputs.scale)
    work = buffers.work
    for index, row in enumerate(work.merge_rows):
        begin, end = work.merge_begins[index : index + 2]
        mine = (partials.lse[work.merge_parts[begin:end]] * math.log(2)).logsumexp(0)
        torch.testing.assert_close(mine, expected[row], rtol=1e-5, atol=1e-5)


def test_constant_values_come_back() -> None:
    """Catches weights that do not sum to one, which random values hide in the tolerance."""
    tree = random_tree(1, num_rows=8, max_len=90)
    inputs = make_inputs(tree, num_kv_heads=1)
    inputs.v_cache.masked_fill_(inputs.v_cache.isfinite(), 0.75)
    out = run(tree.plan(), inputs, options_for(inputs, sharing="all"))
    sees = torch.tensor([bool(tree.visible_slots(r)) for r in range(len(tree.kv_lens))])
    torch.testing.assert_close(out[sees], torch.full_like(out[sees], 0.75), rtol=0, atol=1e-6)
    assert not out[~sees].any()


def test_extreme_scores() -> None:
    """Catches overflow: scores far beyond what exp takes, and rows that are one-hot."""
    tree = decode_tree(3, 80, 20)
    inputs = make_inputs(tree, num_kv_heads=1)
    inputs = Inputs(inputs.query * 40, inputs.k_cache, inputs.v_cache, inputs.scale)
    check(tree, inputs, options_for(inputs, sharing="all"))
    check(tree, inputs, options_for(inputs), softcap=3.0)


def test_no_rows_and_rows_that_see_nothing() -> None:
    """Catches an empty step, and padding rows left as they were found."""
    cache = torch.full((2, 4, 1, 16), math.nan)
    nothing = Inputs(torch.zeros(0, 3, 16), cache, cache, 1.0)
    empty = AttentionPlan.build([], [], block_size=4)
    assert run(empty, nothing, options_for(nothing)).shape == (0, 3, 16)
    idle = Inputs(torch.ones(2, 3, 16), cache, cache, 1.0)
    plan = AttentionPlan.build([KVRun(2, 4, [0], [1])], [0, 1], block_size=4)
    for sinks in (None, torch.zeros(3)):
        out = run(plan, idle, options_for(idle), sinks=sinks)
        assert torch.equal(out, torch.zeros(2, 3, 16))


def test_far_blocks() -> None:
    """Catches offsets in 32 bits: strides so large that block 2 lies beyond 2 ** 31 numbers."""
    tree = Tree(4, 3, (KVRun(0, 7, (2, 0), (0,)),), (7,))
    inputs = make_inputs(tree, num_kv_heads=1, dtype=torch.float16)
    far = torch.empty(2 * (2**30 + 64) + 4 * 16, dtype=torch.float16)  # touched in three places
    shape, strides = (3, 4, 1, 16), (2**30 + 64, 16, 16, 1)
    k_cache = far.as_strided(shape, strides)
    k_cache.copy_(inputs.k_cache)
    moved = Inputs(inputs.query, k_cache, inputs.v_cache, inputs.scale)
    check(tree, moved, options_for(inputs))


@pytest.mark.parametrize("seed", range(4))
def test_the_cpu_says_the_same(seed: int) -> None:
    """Catches two implementations that read one plan differently."""
    tree = random_tree(seed + 20, num_rows=8, max_len=70)
    inputs = make_inputs(tree, num_kv_heads=1)
    plan = tree.plan()
    tensors = (inputs.query, inputs.k_cache, inputs.v_cache)
    mine = tree_attention(*tensors, plan, scale=inputs.scale, implementation="triton")
    other = tree_attention(*tensors, plan, scale=inputs.scale, implementation="cpu")
    assert norm_error(mine, other) < 1e-5


def split_runs(tree: Tree, rng: random.Random) -> Tree:
    """The same tree with runs cut anywhere, and some inlined into their rows."""
    runs: list[KVRun] = []
    for whole in tree.runs:
        inner = sorted({rng.randint(whole.start, whole.end) for _ in range(rng.randint(0, 2))})
        for begin, end in itertools.pairwise([whole.start, *inner, whole.end]):
            first = begin // tree.block_size - whole.start // tree.block_size
            cut = KVRun(begin, end, whole.block_ids[first:], whole.rows)
            inlined = rng.random() < 0.3
            runs += [cut._replace(rows=(row,)) for row in whole.rows] if inlined else [cut]
    return Tree(tree.block_size, tree.num_blocks, tuple(runs), tree.kv_lens)


@pytest.mark.parametrize("seed", range(3))
def test_any_legal_plan_gives_one_answer(seed: int) -> None:
    """Catches results that depend on how sharing is expressed, or decided."""
    rng = random.Random(seed)
    tree = random_tree(seed + 40, num_rows=6, max_len=80)
    inputs = make_inputs(tree, num_kv_heads=1)
    answers = [run(tree.plan(), inputs, options_for(inputs, sharing=how)) for how in SHARING]
    for _ in range(2):
        answers.append(run(split_runs(tree, rng).plan(), inputs, options_for(inputs)))
    assert all(norm_error(answer, answers[0]) < 1e-5 for answer in answers)


def test_permuted_siblings_permute_outputs() -> None:
    """Catches a row's result that depends on its place in the batch."""
    tree = decode_tree(5, 70, 20)
    order = [3, 0, 4, 1, 2]
    tails = [tree.runs[1 + row]._replace(rows=(place,)) for place, row in enumerate(order)]
    permuted = Tree(16, tree.num_blocks, (tree.runs[0], *tails), tree.kv_lens)
    inputs = make_inputs(tree, num_kv_heads=1)
    expected = run(tree.plan(), inputs, options_for(inputs, sharing="all"))
    moved = Inputs(inputs.query[order], inputs.k_cache, inputs.v_cache, inputs.scale)
    got = run(permuted.plan(), moved, options_for(moved, sharing="all"))
    # Not to the bit: the interpreter multiplies by BLAS, which does not treat all rows alike.
    torch.testing.assert_close(got, expected[order], rtol=1e-5, atol=1e-6)


def test_case_086_every_batch_width() -> None:
    """Catches a width of the batch at which rows get each other's results."""
    runs, head = [], 0
    for row in range(33):  # distinct contexts, row r of length r + 1
        needed = row // 4 + 1
        runs.append(KVRun(0, row + 1, range(head, head + needed), (row,)))
        head += needed
    tree = Tree(4, head, tuple(runs), tuple(range(1, 34)))
    inputs = make_inputs(tree, num_kv_heads=1, group=2)
    expected = run(tree.plan(), inputs, options_for(inputs))
    check(tree, inputs, options_for(inputs))
    for width in (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32):
        some = Inputs(inputs.query[:width], inputs.k_cache, inputs.v_cache, inputs.scale)
        plan = AttentionPlan.build(runs[:width], tree.kv_lens[:width], block_size=4)
        got = run(plan, some, options_for(some))
        torch.testing.assert_close(got, expected[:width], rtol=0, atol=BOUNDS[torch.float32])
