"""The CPU implementation against the specification, over trees of every shape."""

import math

import pytest
import torch
from kernel_trees import (
    Inputs,
    Tree,
    chunk_tree,
    decode_tree,
    make_inputs,
    norm_error,
    permute_blocks,
    random_tree,
)

from agentkv_kernels import (
    AttentionPlan,
    KVRun,
    partial_attention,
    reference,
    tree_attention,
)

pytestmark = pytest.mark.usefixtures("cpu_kernels")
BOUNDS = {
    torch.float64: 1e-12,
    torch.float32: 1e-5,
    torch.float16: 1e-3,
    torch.bfloat16: 8e-3,
}


def check(
    tree: Tree,
    inputs: Inputs,
    *,
    window: int | None = None,
    softcap: float | None = None,
    with_sinks: bool = False,
) -> None:
    """Compares both implementations on one plan."""
    num_q_heads = inputs.query.shape[1]
    sinks = torch.linspace(-3, 3, num_q_heads) if with_sinks else None
    plan = tree.plan()
    expected, _ = reference.tree_attention(
        inputs.query,
        inputs.k_cache,
        inputs.v_cache,
        plan,
        scale=inputs.scale,
        window=window,
        softcap=softcap,
        sinks=sinks,
    )
    got = tree_attention(
        inputs.query,
        inputs.k_cache,
        inputs.v_cache,
        plan,
        scale=inputs.scale,
        window=window,
        softcap=softcap,
        sinks=sinks,
        implementation="cpu",
    )
    assert got.dtype == expected.dtype
    assert got.shape == expected.shape
    assert norm_error(got, expected) < BOUNDS[got.dtype]


@pytest.mark.parametrize("permuted", [False, True])
@pytest.mark.parametrize("block_size", [4, 16])
@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 7, 8, 16])
def test_random_trees(group: int, block_size: int, permuted: bool) -> None:
    """Catches wrong heads, cuts inside blocks, lost or doubled runs, poison let through."""
    for seed in range(12):
        tree = random_tree(seed * 31 + group, block_size=block_size, permuted=permuted)
        check(tree, make_inputs(tree, group=group))


@pytest.mark.parametrize("permuted", [False, True])
@pytest.mark.parametrize("seed", range(16))
def test_long_runs(seed: int, permuted: bool) -> None:
    """Catches faults of the paths only long runs take: shared, in place, stretches of both."""
    tree = random_tree(seed, block_size=16, num_rows=20, max_len=500, permuted=permuted)
    check(tree, make_inputs(tree))


@pytest.mark.parametrize("num_rows", [1, 2, 3, 17, 200])
def test_widths(num_rows: int) -> None:
    """Catches faults at one row and at many."""
    tree = random_tree(num_rows, num_rows=num_rows, max_len=30)
    check(tree, make_inputs(tree))


@pytest.mark.parametrize("dtype", BOUNDS)
def test_dtypes(dtype: torch.dtype) -> None:
    """Catches sums in half precision and masks of the wrong type."""
    for seed in range(4):
        tree = random_tree(seed, num_rows=16, max_len=90)
        check(tree, make_inputs(tree, dtype=dtype))
    check(tree := decode_tree(8, 300, 20), make_inputs(tree, dtype=dtype))
    check(tree := chunk_tree((50, 45), (30, 4)), make_inputs(tree, dtype=dtype))


@pytest.mark.parametrize(
    ("window", "softcap", "with_sinks"),
    [(1, None, False), (13, None, False), (100, None, True), (None, 1.5, False), (20, 4.0, True)],
)
def test_modifiers(window: int | None, softcap: float | None, with_sinks: bool) -> None:
    """Catches windows off by one, a softcap after the mask, sinks counted per piece."""
    trees = [random_tree(seed, num_rows=14, max_len=60) for seed in range(6)]
    trees += [
        decode_tree(8, 300, 20),
        permute_blocks(decode_tree(8, 300, 20)),
        chunk_tree((60, 50), (30, 40), (9, 3)),
        chunk_tree((300, 300), prefix=0),
        chunk_tree((300, 60), prefix=0),  # a window of 100: all rows see some of it, none all
    ]
    for tree in trees:
        inputs = make_inputs(tree, window=window)
        check(tree, inputs, window=window, softcap=softcap, with_sinks=with_sinks)


def test_sinks_alone() -> None:
    """Catches a sink forgotten where no merge is needed."""
    check(tree := decode_tree(1, 0, 40), make_inputs(tree), with_sinks=True)
    check(tree := decode_tree(4, 300, 0), make_inputs(tree), with_sinks=True)


@pytest.mark.parametrize("permuted", [False, True])
def test_decode_and_chunks(permuted: bool) -> None:
    """Catches faults in the shapes a server runs: fan-out, one stream, chunks of many branches."""
    shapes = ((16, 512, 20), (3, 16, 1), (1, 0, 300), (5, 0, 210), (4, 1000, 0))
    trees = [decode_tree(*shape) for shape in shapes]
    trees += [
        chunk_tree((100, 100)),
        chunk_tree((70, 64), (64, 64), (3, 3), (40, 1)),
        chunk_tree(*[(8, 4)] * 12),
    ]
    for tree in trees:
        chosen = permute_blocks(tree) if permuted else tree
        check(chosen, make_inputs(chosen))


def test_rows_read_a_run_to_different_ends() -> None:
    """Catches clipping by the shortest row; two branches may read one segment to 10 and to 8."""
    runs = (
        KVRun(0, 8, (2, 0), range(40)),
        KVRun(8, 200, tuple(range(3, 51)), range(40)),
        KVRun(8, 12, (1,), (0, 7, 9)),
    )
    kv_lens = tuple([5, 0, 200, 199] + [60 + 3 * row for row in range(36)])
    tree = Tree(4, 51, runs[:2], kv_lens)
    check(tree, make_inputs(tree))
    tree = Tree(4, 51, (runs[0], runs[2]), kv_lens)
    check(tree, make_inputs(tree))


def test_head_dims_may_differ() -> None:
    """Catches the assumption that values are as wide as keys."""
    for seed in range(4):
        tree = random_tree(seed)
        check(tree, make_inputs(tree, head_dim=24, v_head_dim=16))
    check(tree := chunk_tree((60, 50)), make_inputs(tree, head_dim=24, v_head_dim=16))


def test_any_strides() -> None:
    """Catches a cache read as if its storage were token-major or its last dimension dense."""
    for seed in range(4):
        tree = random_tree(seed, block_size=4, max_len=260)
        plain = make_inputs(tree)
        for order in ((2, 0, 1, 3), (0, 2, 1, 3), (1, 0, 2, 3), (3, 0, 1, 2)):
            back = [order.index(dim) for dim in range(4)]
            check(
                tree,
                Inputs(
                    plain.query.transpose(0, 2).contiguous().transpose(0, 2),
                    plain.k_cache.permute(order).contiguous().permute(back),
                    plain.v_cache.permute(order).contiguous().permute(back),
                    plain.scale,
                ),
            )


def test_without_the_fused_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a fallback that works only where it is never used."""
    monkeypatch.setattr(partial_attention, "_FUSED", None)
    monkeypatch.setattr(partial_attention, "MAX_SCORES", 1000)
    for seed in range(4):
        tree = random_tree(seed, num_rows=16, max_len=90)
        check(tree, make_inputs(tree))
        check(tree, make_inputs(tree, dtype=torch.bfloat16, window=20), window=20)
    check(tree := chunk_tree((70, 64), (40, 30)), make_inputs(tree))


def test_the_fused_operator_is_found() -> None:
    """Catches a torch release that changes the private operator: slower, and nobody notices."""
    assert partial_attention._FUSED is not None


@pytest.mark.parametrize("poison", [math.nan, math.inf])
@pytest.mark.parametrize("window", [None, 30])
def test_later_tokens_do_not_spread(poison: float, window: int | None) -> None:
    """Catches 0 x NaN inside a chunk: a bad token must not reach the rows before it."""
    tree = chunk_tree((70, 64), (40, 3))
    clean = make_inputs(tree, window=window)
    expected = tree_attention(
        clean.query, clean.k_cache, clean.v_cache, tree.plan(), scale=clean.scale, window=window
    )
    bad = make_inputs(tree, window=window)
    slot = tree.slot(tree.runs[1], 60)  # position 60: seen by the first chunk's later rows
    bad.k_cache.flatten(0, 1)[slot] = poison
    bad.v_cache.flatten(0, 1)[slot] = poison
    got = tree_attention(
        bad.query, bad.k_cache, bad.v_cache, tree.plan(), scale=bad.scale, window=window
    )
    for row, kv_len in enumerate(tree.kv_lens):
        hit = row < 64 and kv_len > 60 and (window is None or kv_len - window <= 60)
        if hit:
            assert not got[row].isfinite().any()
        else:
            torch.testing.assert_close(got[row], expected[row], rtol=1e-5, atol=1e-6)


def test_extreme_scores() -> None:
    """Catches overflow: scores of +-60 and rows that attend to one token only."""
    tree = decode_tree(6, 300, 20)
    inputs = make_inputs(tree)
    check(tree, Inputs(inputs.query * 40, inputs.k_cache, inputs.v_cache, inputs.scale))


def test_no_rows() -> None:
    """Catches an empty step, which a batch of head-only samples produces."""
    plan = AttentionPlan.build([], [], block_size=4)
    cache = torch.zeros(2, 4, 2, 8)
    assert tree_attention(torch.zeros(0, 4, 8), cache, cache, plan, scale=1.0).shape == (0, 4, 8)
    idle = AttentionPlan.build([], [0, 0], block_size=4)
    out = tree_attention(torch.ones(2, 4, 8), cache, cache, idle, scale=1.0)
    assert torch.equal(out, torch.zeros(2, 4, 8))
