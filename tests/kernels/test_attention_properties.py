"""What must hold for the CPU implementation whatever the specification says."""

from itertools import pairwise

import pytest
import torch
from kernel_trees import Tree, chunk_tree, decode_tree, make_inputs, norm_error, random_tree

from agentkv_kernels import AttentionPlan, KVRun, RunGrowth, tree_attention

pytestmark = pytest.mark.usefixtures("cpu_kernels")


def split_runs(tree: Tree, at: int) -> Tree:
    """The same tree with every run cut at one position."""
    runs: list[KVRun] = []
    for run in tree.runs:
        bounds = sorted({run.start, run.end, min(max(at, run.start), run.end)})
        for begin, end in pairwise(bounds):
            first = begin // tree.block_size - run.start // tree.block_size
            runs.append(KVRun(begin, end, run.block_ids[first:], run.rows))
    return Tree(tree.block_size, tree.num_blocks, tuple(runs), tree.kv_lens)


def inline_runs(tree: Tree) -> Tree:
    """The same tree with nothing shared: every row lists every run for itself."""
    runs = tuple(run._replace(rows=(row,)) for run in tree.runs for row in run.rows)
    return Tree(tree.block_size, tree.num_blocks, runs, tree.kv_lens)


@pytest.mark.parametrize("seed", range(8))
def test_any_cut_of_the_tree_gives_one_answer(seed: int) -> None:
    """Catches results that depend on how sharing is expressed."""
    tree = random_tree(seed, num_rows=10, max_len=120)
    inputs = make_inputs(tree)

    def attend(tree: Tree) -> torch.Tensor:
        caches = (inputs.k_cache, inputs.v_cache)
        return tree_attention(inputs.query, *caches, tree.plan(), scale=inputs.scale)

    expected = attend(tree)
    assert norm_error(attend(inline_runs(tree)), expected) < 1e-5
    for at in (1, 7, 16, 33):
        assert norm_error(attend(split_runs(tree, at)), expected) < 1e-5


def test_constant_values_come_back() -> None:
    """Catches weights that do not sum to one, which random values hide in the tolerance."""
    for tree in (*map(random_tree, range(6)), decode_tree(16, 512, 20), chunk_tree((70, 64))):
        inputs = make_inputs(tree)
        inputs.v_cache.masked_fill_(inputs.v_cache.isfinite(), 0.75)
        out = tree_attention(
            inputs.query, inputs.k_cache, inputs.v_cache, tree.plan(), scale=inputs.scale
        )
        sees = torch.tensor([bool(tree.visible_slots(r)) for r in range(len(tree.kv_lens))])
        torch.testing.assert_close(out[sees], torch.full_like(out[sees], 0.75), rtol=0, atol=1e-6)
        assert not out[~sees].any()


def test_advance_keeps_the_answers() -> None:
    """Catches groupings of an old step used in a new one."""
    tree = decode_tree(6, 300, 40)
    inputs = make_inputs(tree)
    short = tuple(run._replace(end=301) if run.start else run for run in tree.runs)
    plan = AttentionPlan.build(short, [301] * 6, block_size=16)
    for end in range(302, 341):
        # Rows advance unevenly, as when some branches wait.
        ends = [end if row < 3 else 301 + (end - 301) // 2 for row in range(6)]
        plan.advance(ends, [RunGrowth(row + 1, ends[row]) for row in range(6)])
        runs = (tree.runs[0], *(tree.runs[row + 1]._replace(end=ends[row]) for row in range(6)))
        anew = AttentionPlan.build(runs, ends, block_size=16)
        out, expected = (
            tree_attention(inputs.query, inputs.k_cache, inputs.v_cache, p, scale=inputs.scale)
            for p in (plan, anew)
        )
        assert torch.equal(out, expected)
