"""AttentionPlan: what it accepts, how it moves on."""

import random

import numpy as np
import pytest
from kernel_trees import Tree, random_tree

from agentkv_kernels import AttentionPlan, KVRun, RunGrowth


def test_slots_follow_the_definition() -> None:
    """Catches an off-by-one where a run begins or ends inside a block."""
    for seed in range(8):
        tree = random_tree(seed, block_size=4, num_rows=6)
        plan = tree.plan()
        for index, run in enumerate(tree.runs):
            for begin in range(run.start, run.end):
                expected = [tree.slot(run, position) for position in range(begin, run.end)]
                assert plan.slots(index, begin, run.end).tolist() == expected


def test_visible_clips_to_the_row_and_the_window() -> None:
    """Catches a window counted without the row itself, or a run read beyond the row."""
    plan = AttentionPlan.build([KVRun(3, 9, [0, 1, 2], range(2))], [7, 20], block_size=4)
    assert plan.visible(0, 0, None) == (3, 7)
    assert plan.visible(0, 1, None) == (3, 9)
    assert plan.visible(0, 0, 2) == (5, 7)
    begin, end = plan.visible(0, 1, 4)
    assert end <= begin


def test_rows_become_ranges_where_they_can() -> None:
    """Catches row lists kept in a form that makes each layer gather its queries."""
    runs = [KVRun(0, 1, [0], [1, 2, 3]), KVRun(1, 2, [0], [0, 2]), KVRun(2, 3, [0], range(0, 4, 2))]
    plan = AttentionPlan.build(runs, [3] * 4, block_size=4)
    assert plan.rows == [range(1, 4), (0, 2), (0, 2)]


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (KVRun(5, 4, [0], range(1)), "no range"),
        (KVRun(-1, 4, [0], range(1)), "no range"),
        (KVRun(3, 9, [0, 1], range(1)), "must hold 3 blocks"),
        (KVRun(0, 4, [-1], range(1)), "must not be negative"),
        (KVRun(0, 4, [1 << 31], range(1)), "exceed 32 bits"),
        (KVRun(0, 4, [0], range(3)), r"rows of run 0 must lie in \[0, 2\)"),
        (KVRun(0, 4, [0], [-1]), "must lie in"),
        (KVRun(0, 4, [0], [1, 0]), "strictly ascending"),
        (KVRun(0, 4, [0], [1, 1]), "strictly ascending"),
        (KVRun(0, 4, [0], range(1, -1, -1)), "strictly ascending"),
    ],
)
def test_build_refuses(run: KVRun, message: str) -> None:
    """Catches a bad run that would read another context's blocks."""
    with pytest.raises(ValueError, match=message):
        AttentionPlan.build([run], [4, 4], block_size=4)


def test_build_refuses_bad_numbers() -> None:
    """Catches a negative length or block size, which would slice from the end."""
    with pytest.raises(ValueError, match="kv_lens must not be negative"):
        AttentionPlan.build([], [3, -1], block_size=4)
    with pytest.raises(ValueError, match="block_size must be positive"):
        AttentionPlan.build([], [], block_size=0)


@pytest.mark.parametrize(
    ("kv_lens", "growth", "message"),
    [
        ([9], RunGrowth(0, 9, [2]), "kv_lens must have 2 entries"),
        ([9, -1], RunGrowth(0, 9, [2]), "kv_lens must not be negative"),
        ([9, 9], RunGrowth(1, 9), "grown names run 1 of 1"),
        ([9, 9], RunGrowth(-1, 9), "grown names run -1 of 1"),
        ([9, 9], RunGrowth(0, 7), "grown shrinks run 0 from 8 to 7"),
        ([9, 9], RunGrowth(0, 9), "must hold 3 blocks"),
    ],
)
def test_advance_refuses_and_changes_nothing(
    kv_lens: list[int], growth: RunGrowth, message: str
) -> None:
    """Catches a half-applied step."""
    plan = AttentionPlan.build([KVRun(0, 8, [0, 1], range(2))], [8, 8], block_size=4)
    with pytest.raises(ValueError, match=message):
        plan.advance(kv_lens, [growth])
    with pytest.raises(ValueError, match="at most once"):
        plan.advance([8, 8], [RunGrowth(0, 8, [2]), RunGrowth(0, 8, [3])])
    assert plan.kv_lens == [8, 8]
    assert plan.ends == [8]
    assert plan.blocks[0].tolist() == [0, 1]


def grow(tree: Tree, rng: random.Random) -> tuple[Tree, list[RunGrowth]]:
    """One decode step: rows advance, and the single-row runs that held their tails grow."""
    runs, growths = list(tree.runs), []
    kv_lens = list(tree.kv_lens)
    num_blocks = tree.num_blocks
    for index, run in enumerate(runs):
        if len(run.rows) != 1 or kv_lens[run.rows[0]] != run.end or rng.random() < 0.2:
            continue
        end = run.end + rng.randint(1, 3)
        held = len(run.block_ids)
        missing = max(0, -(-end // tree.block_size) - run.start // tree.block_size - held)
        ids = tuple(range(num_blocks, num_blocks + missing))
        num_blocks += missing
        kv_lens[run.rows[0]] = end
        runs[index] = run._replace(end=end, block_ids=(*run.block_ids, *ids))
        growths.append(RunGrowth(index, end, ids))
    return Tree(tree.block_size, num_blocks, tuple(runs), tuple(kv_lens)), growths


def test_advance_equals_build() -> None:
    """Catches drift between a plan kept for many steps and one made anew."""
    rng = random.Random(5)
    for seed in range(5):
        tree = random_tree(seed, num_rows=10)
        plan = tree.plan()
        for _ in range(40):
            tree, growths = grow(tree, rng)
            plan.advance(tree.kv_lens, growths)
            anew = tree.plan()
            assert (plan.kv_lens, plan.starts, plan.ends, plan.rows) == (
                anew.kv_lens,
                anew.starts,
                anew.ends,
                anew.rows,
            )
            for mine, theirs in zip(plan.blocks, anew.blocks, strict=True):
                np.testing.assert_array_equal(mine, theirs)


def test_reserved_blocks_serve_later_steps() -> None:
    """Catches ids beyond the end being dropped: a caller may hand out blocks ahead."""
    plan = AttentionPlan.build([KVRun(0, 3, [4, 9], range(1))], [3], block_size=4)
    plan.advance([6], [RunGrowth(0, 6)])
    assert plan.slots(0, 0, 6).tolist() == [16, 17, 18, 19, 36, 37]


def test_derived_is_made_once_per_step() -> None:
    """Catches per-layer planning, and results of an old step surviving an advance."""
    calls: list[int | None] = []

    def make(plan: AttentionPlan, window: int | None) -> int:
        calls.append(window)
        return plan.kv_lens[0]

    plan = AttentionPlan.build([KVRun(0, 4, [0, 1], range(1))], [4], block_size=4)
    assert [plan.derived(make, None), plan.derived(make, None), plan.derived(make, 8)] == [4] * 3
    assert calls == [None, 8]
    plan.advance([5], [RunGrowth(0, 5)])
    assert plan.derived(make, None) == 5
