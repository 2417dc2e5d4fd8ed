"""Steps as graphs, with a stand-in that runs the same work again: all but the capture itself."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hand_forked import HandBranch, HandForked
from tiny_models import VOCAB_SIZE, build_tiny_model
from torch import Tensor

from agentkv.core.batch import NO_SLOT, Batch, Sample, Stream
from agentkv.model import graph_sizes
from agentkv.model.decode_graphs import DecodeGraphs
from agentkv.model.graph_reader import PlanGraphReader
from agentkv.model.graph_sizes import ROW_SIZES, capacity, levels, row_sizes, smallest_level
from agentkv.model.hand_batch import BranchRows, Piece, batch_of
from agentkv.model.paged_step import AttentionOptions, Reader
from agentkv.model.step_graph import Rerun, graph_maker
from agentkv.model.step_rows import StaticRows, StepRows
from agentkv.sampling_params import SamplingParams
from agentkv_kernels import AttentionPlan
from agentkv_kernels.work_buffers import Buckets

CPU = torch.device("cpu")
TOLERANCE = 1e-5
PROMPT = [5, 17, 3, 88, 41, 9, 60]


def silent(_: str) -> None:
    pass


def tree(max_rows: int | None, family: str = "llama", **options: Any) -> HandForked:
    """A poisoned pool and a runner, with graphs for so many rows or without."""
    run = HandForked(build_tiny_model(family), **options)
    if max_rows is not None:
        run.runner.capture_graphs(max_rows, silent)
    return run


def grow(run: HandForked) -> tuple[list[Tensor], list[HandBranch]]:
    """A prompt, branches forked inside a block, decoding by one, five and three rows."""
    root = run.create()
    seen = run.step((root, PROMPT))
    branches = [root, *(run.fork(root, 7) for _ in range(4))]
    for turn in range(6):
        work = [(branch, [(11 * turn + 5 * i) % VOCAB_SIZE]) for i, branch in enumerate(branches)]
        seen += run.step(*work)
    for turn in range(5):
        seen += run.step(*((branch, [turn + 1]) for branch in branches[1:4]))
    seen += run.step((branches[2], [44]))
    return seen, branches


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss", "gpt2"])
def test_graphs_change_no_answer(family: str) -> None:
    """Catches stale rows or plans in a replay, and padding that reaches an answer or the pool."""
    plain, graphed = tree(None, family), tree(8, family)
    expected, _ = grow(plain)
    got, _ = grow(graphed)
    for ours, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=TOLERANCE)
    assert graphed.runner.statistics().num_graph_steps == 13
    for layer in range(graphed.kv.shape.num_layers):
        for ours, theirs in zip(graphed.kv.layer(layer), plain.kv.layer(layer), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=TOLERANCE, equal_nan=True)


def test_plans_are_kept_over_replays() -> None:
    """Catches a plan built at every step because it is padded: that is what graphs are to spare."""
    run = tree(8)
    grow(run)
    statistics = run.runner.statistics()
    assert statistics.num_plan_builds == 4
    assert statistics.num_plan_advances == statistics.num_steps - 4


def test_sampled_tokens_equal_those_without_graphs() -> None:
    """Catches logits of another row, or of the step before, given to the sampler."""

    def tokens(run: HandForked) -> list[list[int]]:
        root = run.create()
        run.step((root, PROMPT))
        branches = [run.fork(root) for _ in range(3)]
        params = SamplingParams(temperature=1.0)
        last, chosen = [1, 2, 3], []
        for position in range(8):
            batch = run.batch(
                *((branch, [token]) for branch, token in zip(branches, last, strict=True)),
                samples=[
                    Sample(row, None, params, Stream(9, row), position=position)
                    for row in (2, 0, 1)
                ],
            )
            by_row = run.runner.run(batch).samples
            last = [by_row[1].token, by_row[2].token, by_row[0].token]
            chosen.append(last)
        return chosen

    graphed = tree(4)
    assert tokens(graphed) == tokens(tree(None))
    assert graphed.runner.statistics().num_graph_steps == 8


def test_other_steps_run_without_a_graph() -> None:
    """Catches a chunk, or a step too large for any graph, that is padded or cut."""
    run = tree(2)
    root = run.create()
    run.runner.run(run.batch((root, PROMPT), heads=[6]))
    branches = [run.fork(root) for _ in range(3)]
    run.step(*((branch, [7]) for branch in branches))
    assert run.runner.statistics().num_graph_steps == 0
    (logits,) = run.step((branches[0], [8]))
    assert run.runner.statistics().num_graph_steps == 1
    torch.testing.assert_close(logits, run.expected(branches[0])[-1:], rtol=0, atol=TOLERANCE)


def test_a_recomputed_token_runs_as_a_graph_and_writes_nothing() -> None:
    """Catches a graph that stores rows without a slot."""
    run = tree(4)
    root = run.create()
    run.step((root, PROMPT))
    before = [part.clone() for layer in (0, 1) for part in run.kv.layer(layer)]
    logits = run.again(root)
    torch.testing.assert_close(logits, run.expected(root)[-1], rtol=0, atol=TOLERANCE)
    after = [part for layer in (0, 1) for part in run.kv.layer(layer)]
    for now, then in zip(after, before, strict=True):
        torch.testing.assert_close(now, then, rtol=0, atol=0, equal_nan=True)
    assert run.runner.statistics().num_graph_steps == 1


def test_kept_heads_outlive_the_replays_after_them() -> None:
    """Catches a head that is a view of the graphs' one buffer of logits."""
    run = tree(4)
    root = run.create()
    run.step((root, PROMPT))
    (head,) = run.runner.run(run.batch((root, [4]), keep=True)).heads
    assert isinstance(head, Tensor)
    before = head.clone()
    run.step((root, [5]))
    assert torch.equal(head, before)


class PickyReader(PlanGraphReader):
    """Takes no plan that reads more than so many positions."""

    longest = 9

    def load(self, plan: AttentionPlan) -> int | None:
        return super().load(plan) if max(plan.kv_lens) <= self.longest else None


def graphs_of(reader: PlanGraphReader, max_rows: int = 2) -> DecodeGraphs:
    return DecodeGraphs(reader, graph_maker(CPU), max_rows=max_rows, block_size=4, device=CPU)


def one_row(position: int) -> Batch:
    piece = Piece(0, 0, position + 1, tuple(range(position // 4 + 1)))
    return batch_of([BranchRows((3,), position, (piece,))], block_size=4)


def plan_of(batch: Batch, num_rows: int) -> AttentionPlan:
    lens = [position + 1 for position in batch.positions]
    return AttentionPlan.build([], [*lens, *[0] * (num_rows - len(lens))], block_size=4)


def add_up(rows: StepRows, reader: Reader) -> Tensor:
    """Stands in for the model: a row's logits say what its row was given."""
    return torch.stack((rows.token_ids, rows.positions, rows.slots), dim=1)


def test_a_plan_that_no_graph_can_run_is_declined() -> None:
    """Catches a work list cut off at what its graph starts."""
    graphs = graphs_of(PickyReader(AttentionOptions()))
    graphs.capture(add_up, silent)
    fits, too_long = one_row(8), one_row(9)
    assert graphs.run(too_long, plan_of(too_long, 1)) is None
    assert graphs.num_replays == 0
    logits = graphs.run(fits, plan_of(fits, 1))
    assert logits is not None
    assert logits.tolist() == [[3, 8, 8]]


def test_padding_is_token_zero_at_position_zero_without_a_slot() -> None:
    """Catches rows of an earlier, larger step that are still in the buffers (case 80)."""
    rows = StaticRows(3, CPU)
    full = batch_of([BranchRows((7, 8, 9), 0, (Piece(0, 0, 3, (2,)),))], block_size=4)
    rows.load(full, 3)
    before = rows.first(3)
    assert before.slots.tolist() == [8, 9, 10]
    rows.load(one_row(5), 3)
    after = rows.first(3)
    assert after.token_ids.tolist() == [3, 0, 0]
    assert after.positions.tolist() == [5, 0, 0]
    assert after.slots.tolist() == [5, NO_SLOT, NO_SLOT]
    assert after.token_ids.data_ptr() == before.token_ids.data_ptr()


def test_progress_is_told_for_each_graph() -> None:
    """Catches a start that seems to hang while it captures."""
    lines: list[str] = []
    graphs = graphs_of(PlanGraphReader(AttentionOptions()), max_rows=8)
    graphs.capture(add_up, lines.append)
    assert lines[0] == "Capturing CUDA graphs: 1 of 4, 8 rows"
    assert lines[-1] == "Capturing CUDA graphs: 4 of 4, 1 rows"


def test_a_failed_capture_leaves_the_runner_without_graphs() -> None:
    """Catches a runner that replays half a set of graphs, or none that exists."""

    class Failing(Rerun):
        def capture(self, work: Callable[[], None]) -> None:
            raise RuntimeError("operation not permitted when stream is capturing")

    run = tree(None)
    with pytest.raises(RuntimeError, match="not permitted"):
        run.runner.capture_graphs(2, silent, make_graph=Failing)
    root = run.create()
    run.step((root, PROMPT))
    run.step((root, [4]))
    assert run.runner.statistics().num_graph_steps == 0


def test_fixed_rows_pad_every_step() -> None:
    """Catches matrix products whose shape depends on what else runs."""
    widths: list[int] = []

    def watch(_: object, arguments: Sequence[Tensor]) -> None:
        widths.append(arguments[0].shape[-2])

    run = HandForked(build_tiny_model("llama"), fixed_rows=8)
    for module in run.model.modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_pre_hook(watch)
    root = run.create()
    seen = torch.cat([*run.step((root, PROMPT)), *run.step((root, [4]))])
    run.runner.run(run.batch((root, [6, 7]), heads=[1]))
    assert set(widths) == {8}
    torch.testing.assert_close(seen, run.expected(root)[:8], rtol=0, atol=TOLERANCE)


def test_sizes_reach_exactly_as_far_as_asked() -> None:
    """Catches the largest step without a graph, and graphs that no step can need."""
    assert row_sizes(1) == (1,)
    assert row_sizes(5) == (1, 2, 4, 5)
    assert row_sizes(10_000) == ROW_SIZES


@pytest.mark.parametrize("num_rows", [1, 5, 64, 256])
def test_the_first_level_that_is_large_enough_is_taken(num_rows: int) -> None:
    """Catches a launch with fewer programs than items: some KV would not be read."""
    low, high = levels(num_rows)
    assert all(a <= b for a, b in zip(low, high, strict=True))
    assert smallest_level((low, high), [low, Buckets(16, 0, 0, 16)]) == 0
    assert smallest_level((low, high), [low, low._replace(large=low.large + 1)]) == 1
    assert smallest_level((low, high), [high._replace(partials=high.partials + 1), low]) is None
    room = capacity(num_rows, high, num_blocks=1000)
    assert (room.small, room.large, room.partials) == (high.small, high.large, high.partials)
    assert room.blocks >= 1000


def test_block_ids_are_bounded() -> None:
    """Catches buffers that grow with the pool without end."""
    assert capacity(256, levels(256)[-1], num_blocks=1 << 30).blocks == graph_sizes.MAX_BLOCK_IDS
