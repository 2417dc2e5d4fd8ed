"""How a plan is cut into work for a GPU: host integers only."""

from typing import Any

import numpy as np
import pytest
import torch
from kernel_trees import Tree, chunk_tree, decode_tree, random_tree

from agentkv_kernels import AttentionPlan, Capacity, KVRun, RunGrowth, WorkBuffers, WorkOptions
from agentkv_kernels.work_buffers import bucket
from agentkv_kernels.work_list import WorkList
from agentkv_kernels.work_options import Sharing

LLAMA = WorkOptions(num_q_heads=32, num_kv_heads=8, head_dim=128, v_head_dim=128, kv_item_bytes=2)
TINY = WorkOptions(6, 2, 16, 16, 4, split_tokens=64)
CPU = torch.device("cpu")


def items_of(work: WorkList) -> np.ndarray[tuple[int, ...], np.dtype[np.int32]]:
    return np.concatenate((work.small, work.large))


def slots_read(work: WorkList, row: int) -> list[int]:
    """Slots that the items let a row see, straight from the definition of an item."""
    slots = []
    window = work.options.window
    low = 0 if window is None else work.kv_lens[row] - window
    for begin_row, num_rows, offset, begin, cap, _, _, _ in items_of(work).tolist():
        rows = work.q_rows[begin_row : begin_row + num_rows]
        if row in rows:
            end = min(cap, int(work.kv_lens[rows].max()))
            slots += [
                int(work.blocks[offset + position // work.block_size]) * work.block_size
                + position % work.block_size
                for position in range(begin, end)
                if low <= position < work.kv_lens[row]
            ]
    return slots


def distinct_kv(work: WorkList) -> int:
    """Tokens loaded by all items, counted once for each tile of rows."""
    items = items_of(work)
    ends = [
        min(int(item[4]), int(work.kv_lens[work.q_rows[item[0] : item[0] + item[1]]].max()))
        for item in items
    ]
    return int(sum(ends) - items[:, 3].sum())


@pytest.mark.parametrize("window", [None, 9, 30])
@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize("sharing", ["cost", "all", "none"])
def test_every_row_reads_what_it_sees_once(
    sharing: Sharing, invariant: bool, window: int | None
) -> None:
    """Catches a token read twice or not at all, wherever runs are shared, inlined and split."""
    options = TINY._replace(sharing=sharing, batch_invariant=invariant, window=window)
    for seed in range(10):
        tree = random_tree(seed, num_rows=14, max_len=150)
        work = WorkList(tree.plan(), options)
        for row in range(len(tree.kv_lens)):
            assert sorted(slots_read(work, row)) == sorted(tree.visible_slots(row, window))


def test_partials_and_outputs_have_one_writer() -> None:
    """Catches two items on one partial, a row both written and merged, or one never written."""
    for seed in range(12):
        tree = random_tree(seed, num_rows=20, max_len=150)
        work = WorkList(tree.plan(), TINY._replace(sharing=("all", "cost")[seed % 2]))
        written: list[int] = []
        parts: dict[int, int] = {}
        for begin, num_rows, _, _, _, part, _, _ in items_of(work).tolist():
            rows = work.q_rows[begin : begin + num_rows].tolist()
            if part < 0:
                written += rows
            else:
                parts |= dict(zip(range(part, part + num_rows), rows, strict=True))
        assert sorted(parts) == list(range(work.num_partials))
        assert sorted([*written, *work.merge_rows.tolist()]) == list(range(work.num_rows))
        for index, row in enumerate(work.merge_rows.tolist()):
            begin, end = work.merge_begins[index : index + 2]
            assert all(parts[part] == row for part in work.merge_parts[begin:end].tolist())
        assert sorted(work.merge_parts.tolist()) == sorted(parts)


def test_a_long_prefix_is_read_once_a_short_one_is_not() -> None:
    """Catches a decision by anything but bytes: two branches share from about 80 tokens on."""
    for prefix, shared in ((48, False), (320, True)):
        work = WorkList(decode_tree(2, prefix, 16).plan(), LLAMA)
        assert distinct_kv(work) == (prefix if shared else 2 * prefix) + 2 * 16
        assert (work.num_partials > 0) == shared


def test_nothing_shared_costs_nothing_more() -> None:
    """Catches partials and merges in plain decode, where each row has one item."""
    runs = [KVRun(0, 200, range(13 * row, 13 * row + 13), (row,)) for row in range(40)]
    work = WorkList(AttentionPlan.build(runs, [200] * 40, block_size=16), LLAMA)
    assert (work.num_partials, len(work.merge_rows), len(work.small)) == (0, 0, 40)


def test_tile_classes() -> None:
    """Catches rows of many heads in the small class, or few in the large."""
    work = WorkList(decode_tree(4, 1024, 16).plan(), LLAMA)
    assert set(work.small[:, 1].tolist()) == {1, 4}
    work = WorkList(decode_tree(40, 1024, 16).plan(), LLAMA)
    assert set(work.large[:, 1].tolist()) == {16, 8}  # 64 / 4 heads: 16 + 16 + 8 rows
    assert set(work.small[:, 1].tolist()) == {1}


def test_long_pieces_come_first_and_none_is_endless() -> None:
    """Catches a tail of one long program, and a row that merges hundreds of pieces."""
    for prefix in (500, 5000, 200_000):
        work = WorkList(decode_tree(3, prefix, 40).plan(), LLAMA)
        for items in (work.small, work.large):
            lengths = np.minimum(items[:, 4], prefix + 40) - items[:, 3]
            assert (np.diff(lengths) <= 0).all()
        assert int(np.diff(work.merge_begins).max()) <= 64
        assert work.num_partials >= (3 * 16 if prefix > 5000 else 0)


def test_what_no_window_reaches_has_no_item() -> None:
    """Catches a window that only masks, and so still costs the whole prefix."""
    work = WorkList(decode_tree(8, 4096, 16).plan(), LLAMA._replace(window=512))
    assert distinct_kv(work) <= 512 + 16 + 8 * 16


def test_later_rows_of_a_chunk_do_not_wait_for_the_future() -> None:
    """Catches items above the diagonal of a chunk: half of its work."""
    tree = chunk_tree((256, 256), prefix=64)
    work = WorkList(tree.plan(), TINY)
    items = items_of(work)
    reach = [work.kv_lens[work.q_rows[item[0] : item[0] + item[1]]].max() for item in items]
    assert (items[:, 3] < np.array(reach)).all()


def step(tree: Tree, end: int) -> list[RunGrowth]:
    return [RunGrowth(index, end) for index in range(1, len(tree.runs))]


def decoding(tree: Tree, end: int) -> AttentionPlan:
    runs = [tree.runs[0], *(run._replace(end=end) for run in tree.runs[1:])]
    return AttentionPlan.build(runs, [end] * len(tree.kv_lens), block_size=16)


def test_a_list_follows_until_its_reserve_is_used_up() -> None:
    """Catches planning every step, and a kernel that reads beyond its list."""
    tree = decode_tree(3, 200, 400)
    plan = decoding(tree, 201)
    work = WorkList(plan, LLAMA._replace(reserve=100))
    (cap,) = set(items_of(work)[:, 4].tolist()) - {200}
    followed = 0
    for end in range(202, 601):
        plan.advance([end] * 3, step(tree, end))
        if not work.follow(plan):
            break
        followed += 1
        for row in range(3):
            expected = [tree.slot(tree.runs[0], position) for position in range(200)]
            expected += [tree.slot(tree.runs[1 + row], position) for position in range(200, end)]
            assert sorted(slots_read(work, row)) == sorted(expected)
    assert end == cap + 1
    assert followed >= 100


def test_a_list_does_not_follow_what_it_was_not_cut_for() -> None:
    """Catches cuts kept that are wrong now, and a list changed by a refusal."""
    tree = decode_tree(2, 64, 40)
    plan = decoding(tree, 70)
    work = WorkList(plan, LLAMA)
    before = work.kv_lens
    plan.advance([71, 71], [RunGrowth(1, 71)])  # row 1 came further than its run
    assert not work.follow(plan)
    assert work.kv_lens is before
    plan = decoding(tree, 70)
    work = WorkList(plan, LLAMA)
    plan.advance([70, 69], [])  # a truncated branch
    assert not work.follow(plan)
    inner = AttentionPlan.build([KVRun(0, 9, [0, 1], range(2)), KVRun(9, 10, [1], [0])], [10, 9],
                                block_size=8)  # fmt: skip
    work = WorkList(inner, LLAMA)
    inner.advance([10, 9], [RunGrowth(0, 10)])  # a run with others below
    assert not work.follow(inner)


def test_plans_keep_their_list_over_steps() -> None:
    """Catches a list made anew for each step or layer, or shared by layers that differ."""
    tree = decode_tree(2, 100, 60)
    plan = decoding(tree, 101)
    first = plan.followed(WorkBuffers.of, LLAMA, CPU)
    assert plan.followed(WorkBuffers.of, LLAMA, CPU) is first
    windowed = plan.followed(WorkBuffers.of, LLAMA._replace(window=50), CPU)
    assert windowed is not first
    plan.advance([102, 102], step(tree, 102))
    assert plan.followed(WorkBuffers.of, LLAMA, CPU) is first
    assert first.part("kv_lens")[:2].tolist() == [102, 102]
    plan.advance([101, 101])
    assert plan.followed(WorkBuffers.of, LLAMA, CPU) is not first


def test_what_does_not_fit_is_refused_and_nothing_changes() -> None:
    """Catches a list written past its part of the buffer."""
    small = WorkBuffers(TINY, Capacity(16, 16, 16, 16, 16, 16), CPU)
    tree = decode_tree(2, 20, 3)
    assert small.load(AttentionPlan.build([tree.runs[0]], [20, 20], block_size=16))
    before = [small.part(name).clone() for name in ("counts", "kv_lens", "blocks")]
    assert not small.load(decode_tree(40, 20, 3).plan())
    after = [small.part(name) for name in ("counts", "kv_lens", "blocks")]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_buckets_double() -> None:
    """Catches a graph key that changes with every item."""
    assert [bucket(n) for n in (0, 1, 16, 17, 33, 1000)] == [0, 16, 16, 32, 64, 1024]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"split_tokens": 100}, "split_tokens must be a multiple of 64"),
        ({"split_tokens": 0}, "split_tokens must be a multiple of 64"),
        ({"reserve": -1}, "reserve must not be negative"),
        ({"sharing": "some"}, "sharing must be"),
        ({"num_programs": 0}, "num_programs must be positive"),
    ],
)
def test_options_refused(changed: dict[str, Any], message: str) -> None:
    """Catches an option that would be read as something else."""
    with pytest.raises(ValueError, match=message):
        WorkList(decode_tree(2, 20, 3).plan(), LLAMA._replace(**changed))
