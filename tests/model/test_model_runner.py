"""One Batch in, tokens and log-probabilities out: order, heads, slices, plan reuse."""

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hand_forked import HandBranch, HandForked
from tiny_models import VOCAB_SIZE, build_tiny_model
from torch import Tensor

from agentkv.core.batch import Batch, BlockCopy, Sample, Sampled, Score, Stream
from agentkv.model.hand_batch import BranchRows, Piece, batch_of
from agentkv.model.kv_cache import KVCache
from agentkv.model.model_runner import ModelRunner
from agentkv.model.model_shape import describe_model
from agentkv.model.sampler import Sampler
from agentkv.model.weights import convert_weights
from agentkv.sampling_params import SamplingParams
from agentkv_kernels.native import load_native

TOLERANCE = 1e-4
PROMPT = (5, 17, 3, 88, 41, 9, 60)


def sample_of(row: int | None, head: object = None) -> Sample:
    return Sample(row, head, SamplingParams(), Stream(0, 0), position=0)


def empty_batch(*, samples: Sequence[Sample] = (), scores: Sequence[Score] = ()) -> Batch:
    return batch_of([], block_size=4, samples=samples, scores=scores)


def kv_bytes(kv: KVCache) -> list[Tensor]:
    return [part.clone() for layer in range(kv.shape.num_layers) for part in kv.layer(layer)]


def assert_same_bytes(kv: KVCache, before: list[Tensor]) -> None:
    for now, then in zip(kv_bytes(kv), before, strict=True):
        torch.testing.assert_close(now, then, rtol=0, atol=0, equal_nan=True)


def forked(**options: Any) -> HandForked:
    return HandForked(build_tiny_model("llama"), **options)


def decode(
    run: HandForked, branches: Sequence[HandBranch], tokens: Sequence[int]
) -> tuple[int, ...]:
    """One decode step of all branches; returns the tokens chosen for them."""
    batch = run.batch(
        *((branch, [token]) for branch, token in zip(branches, tokens, strict=True)),
        samples=[sample_of(row) for row in range(len(branches))],
    )
    return tuple(sampled.token for sampled in run.runner.run(batch).samples)


def test_answers_come_in_the_order_asked() -> None:
    """Catches answers in row order, where samples, heads and scores name rows in any order."""
    run = forked()
    branch = run.create()
    batch = run.batch(
        (branch, PROMPT),
        samples=[sample_of(6), sample_of(0), sample_of(6)],
        scores=[Score(3, None, 41), Score(1, None, 3)],
        heads=[5, 2],
    )
    result = run.runner.run(batch)
    expected = run.expected(branch)
    greedy = expected.argmax(dim=-1).tolist()
    assert [sampled.token for sampled in result.samples] == [greedy[6], greedy[0], greedy[6]]
    logprobs = expected.log_softmax(dim=-1)
    assert result.scores == pytest.approx(
        [float(logprobs[3, 41]), float(logprobs[1, 3])], abs=TOLERANCE
    )
    for head, row in zip(result.heads, (5, 2), strict=True):
        assert isinstance(head, Tensor)
        assert head.shape == (VOCAB_SIZE,)
        torch.testing.assert_close(head, expected[row], rtol=0, atol=TOLERANCE)


def test_kept_heads_sample_and_score_without_running_the_model() -> None:
    """Catches a runner that needs rows: forty samples of one prompt need none."""
    run = forked()
    branch = run.create()
    (head,) = run.runner.run(run.batch((branch, PROMPT), heads=[6])).heads
    rows_before = run.runner.statistics().num_rows
    result = run.runner.run(
        empty_batch(
            samples=[sample_of(None, head)] * 40,
            scores=[Score(None, head, token) for token in range(VOCAB_SIZE)],
        )
    )
    best = int(run.expected(branch)[-1].argmax())
    assert {sampled.token for sampled in result.samples} == {best}
    assert sum(math.exp(score) for score in result.scores) == pytest.approx(1, abs=1e-5)
    assert run.runner.statistics().num_rows == rows_before
    assert result.heads == ()


def test_heads_and_rows_mix_in_one_batch() -> None:
    """Catches heads gathered after rows, whatever the order asked."""
    run = forked()
    first, second = run.create(), run.create()
    (head,) = run.runner.run(run.batch((first, PROMPT), heads=[6])).heads
    batch = run.batch(
        (second, [9, 9, 2]),
        samples=[sample_of(2), sample_of(None, head), sample_of(1)],
        scores=[Score(None, head, 7), Score(0, None, 9)],
    )
    result = run.runner.run(batch)
    ours, theirs = run.expected(second), run.expected(first)[-1]
    chosen = [sampled.token for sampled in result.samples]
    assert chosen == [int(ours[2].argmax()), int(theirs.argmax()), int(ours[1].argmax())]
    expected = [float(theirs.log_softmax(-1)[7]), float(ours[0].log_softmax(-1)[9])]
    assert result.scores == pytest.approx(expected, abs=TOLERANCE)


def test_kept_heads_outlive_their_step() -> None:
    """Catches a head that is a view: it would hold the step's logits, or change with the next."""
    run = forked()
    branch = run.create()
    head, _ = run.runner.run(run.batch((branch, PROMPT), heads=[6, 5])).heads
    assert isinstance(head, Tensor)
    before = head.clone()
    decode(run, [branch], [4])
    assert torch.equal(head, before)
    assert head.untyped_storage().nbytes() == 4 * VOCAB_SIZE


class WidthSampler(Sampler):
    """The real sampler, keeping how many rows each call was given."""

    def __init__(self) -> None:
        super().__init__()
        self.widths: list[int] = []
        self.scored_widths: list[int] = []

    def sample(self, logits: Tensor, samples: Sequence[Sample]) -> list[Sampled]:
        self.widths.append(len(logits))
        return super().sample(logits, samples)

    def token_logprobs(self, logits: Tensor, tokens: Sequence[int]) -> list[float]:
        self.scored_widths.append(len(logits))
        return super().token_logprobs(logits, tokens)


def test_logits_are_reduced_in_bounded_slices() -> None:
    """Catches a long score that converts all its rows of logits at once."""
    model = build_tiny_model("llama")
    kv = KVCache(describe_model(model), num_blocks=8, block_size=4)
    rows = BranchRows(PROMPT, 0, (Piece(0, 0, 7, (2, 5)),))
    batch = batch_of(
        [rows],
        block_size=4,
        scores=[Score(row, None, row + 10) for row in range(7)],
        samples=[sample_of(row) for row in range(4)],
    )
    sampler = WidthSampler()
    sliced = ModelRunner(model, kv, sampler, slice_bytes=3 * 4 * VOCAB_SIZE + 1).run(batch)
    assert sampler.widths == [3, 1]
    assert sampler.scored_widths == [3, 3, 1]
    whole = ModelRunner(model, kv, sampler).run(batch)
    assert sampler.widths == [3, 1, 4]
    assert sliced.scores == pytest.approx(whole.scores, abs=TOLERANCE)
    assert sliced.samples == whole.samples


def test_rows_without_slot_write_nothing() -> None:
    """Catches a recomputed last token that writes a shared block, or slot -1 as the last one."""
    run = forked(block_size=4, num_blocks=8)
    branch = run.create()
    (logits,) = run.step((branch, PROMPT))
    before = kv_bytes(run.kv)
    torch.testing.assert_close(run.again(branch), logits[-1], rtol=0, atol=TOLERANCE)
    assert_same_bytes(run.kv, before)


def test_rows_without_slot_beside_written_ones() -> None:
    """Catches all rows skipped, or all written, when only some have a slot."""
    run = forked(block_size=4, num_blocks=8)
    rows = BranchRows(PROMPT, 0, (Piece(0, 0, 7, (2, 5)),))
    run.runner.run(batch_of([rows], block_size=4))
    before = kv_bytes(run.kv)
    again = BranchRows(PROMPT[-1:], 6, rows.path, is_stored=False)
    other = BranchRows((1, 2), 0, (Piece(1, 0, 2, (7,)),))
    run.runner.run(batch_of([again, other], block_size=4))
    for now, then in zip(kv_bytes(run.kv), before, strict=True):
        assert torch.equal(now[[2, 5]].nan_to_num(), then[[2, 5]].nan_to_num())
        assert bool(now[7, :2].isfinite().all())
        assert bool(now[7, 2:].isnan().all())


def test_copies_come_before_writes_of_the_same_step() -> None:
    """Catches a copy done after the parent has gone on in the block it shares.

    The parent overwrites a slot below the fork point, which no scheduler does: only so does the
    order show.
    """
    run = forked(block_size=4, num_blocks=8)
    run.runner.run(batch_of([BranchRows(PROMPT[:3], 0, (Piece(0, 0, 3, (2,)),))], block_size=4))
    old = [part[2, :3].clone() for part in kv_bytes(run.kv)]
    other = BranchRows((80, 81, 82, 83), 0, (Piece(1, 0, 4, (2,)),))
    run.runner.run(batch_of([other], block_size=4, copies=[BlockCopy(2, 6, 3)]))
    for now, then in zip(kv_bytes(run.kv), old, strict=True):
        assert torch.equal(now[6, :3], then)
        assert not torch.equal(now[2, :3], then)


def test_a_batch_with_nothing_to_answer_computes_its_rows() -> None:
    """Catches a chunk of a prefill, which asks for no logits, skipped or refused."""
    run = forked()
    branch = run.create()
    result = run.runner.run(run.batch((branch, PROMPT)))
    assert (result.samples, result.heads, result.scores) == ((), (), ())
    (logits,) = run.step((branch, [1]))
    torch.testing.assert_close(logits, run.expected(branch)[-1:], rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), 1e30])
def test_case_079_unwritten_slots_do_not_reach_the_logits(poison: float) -> None:
    """Catches slots past a length that are masked in the scores but still multiplied."""

    def logits(value: float) -> list[Tensor]:
        run = forked(block_size=16, poison=value)
        long, short = run.create(), run.create()
        answers = run.step((long, range(17)), (short, PROMPT[:3]))
        child = run.fork(long, at=5)
        return answers + run.step((long, [1]), (short, [2]), (child, [3, 4]))

    assert all(map(torch.equal, logits(poison), logits(0.0)))


def test_a_decode_builds_its_plan_only_when_the_topology_changes() -> None:
    """Catches a plan built every step, and one kept over a fork.

    Forty steps of three branches: one plan for the prompt, one when the children's first writes
    cut the block of the fork, one when a fourth branch joins; block boundaries are no reason.
    """
    run = forked(block_size=4, num_blocks=80)
    root = run.create()
    (logits,) = run.step((root, PROMPT))
    branches = [root, run.fork(root), run.fork(root)]
    tokens: Sequence[int] = [int(logits[-1].argmax()), 20, 30]
    for step in range(40):
        if step == 25:
            branches.append(run.fork(branches[1]))
            tokens = [*tokens, 40]
        tokens = decode(run, branches, tokens)
    for branch, token in zip(branches, tokens, strict=True):
        assert token == int(run.expected(branch)[-1].argmax())
    statistics = run.runner.statistics()
    assert statistics.num_steps == 41
    assert statistics.num_rows == len(PROMPT) + 25 * 3 + 15 * 4
    assert statistics.num_plan_builds == 3
    assert statistics.num_plan_advances == 38


def test_a_run_whose_blocks_were_replaced_gets_a_new_plan() -> None:
    """Catches a plan kept by segment id alone: after KV gave way, the blocks are others."""
    run = forked(block_size=4, num_blocks=8)
    rows = BranchRows(PROMPT[:5], 0, (Piece(0, 0, 5, (2, 5)),))
    run.runner.run(batch_of([rows], block_size=4))
    rows = BranchRows(PROMPT[5:6], 5, (Piece(0, 0, 6, (2, 5)),))
    run.runner.run(batch_of([rows], block_size=4))
    run.kv.copy([BlockCopy(2, 6, 4), BlockCopy(5, 1, 2)])
    for part in (part for layer in (0, 1) for part in run.kv.layer(layer)):
        part[[2, 5]] = float("nan")
    rows = BranchRows(PROMPT[6:], 6, (Piece(0, 0, 7, (6, 1)),))
    (head,) = run.runner.run(batch_of([rows], block_size=4, heads=[0])).heads
    assert isinstance(head, Tensor)
    expected = run.expected(HandBranch(list(PROMPT)))[-1]
    torch.testing.assert_close(head, expected, rtol=0, atol=TOLERANCE)


def test_a_truncated_branch_gets_a_new_plan() -> None:
    """Catches a run that shrinks being moved on as if it had grown."""
    run = forked(block_size=4, num_blocks=8)
    path = (Piece(0, 0, 7, (2, 5)),)
    run.runner.run(batch_of([BranchRows(PROMPT, 0, path)], block_size=4))
    for end in (6, 5):
        rows = BranchRows((50,), end - 1, (Piece(0, 0, end, (2, 5)),))
        (head,) = run.runner.run(batch_of([rows], block_size=4, heads=[0])).heads
        expected = run.expected(HandBranch([*PROMPT[: end - 1], 50]))[-1]
        assert isinstance(head, Tensor)
        torch.testing.assert_close(head, expected, rtol=0, atol=TOLERANCE)
    assert run.runner.statistics().num_plan_builds == 3


def test_a_refused_step_leaves_the_plan_as_it_was() -> None:
    """Catches a plan half moved on by a step that the kernels refused."""
    run = forked(block_size=4, num_blocks=8)
    path = (Piece(0, 0, 4, (2,)),)
    run.runner.run(batch_of([BranchRows(PROMPT[:4], 0, path)], block_size=4))
    broken = Batch(
        token_ids=(1, 2, 3, 4),
        positions=(4, 5, 6, 7),
        slots=(20, 21, 22, 23),
        runs=batch_of([BranchRows((1, 2, 3, 4), 4, (Piece(0, 0, 8, (2,)),))], block_size=8).runs,
        copies=(),
        samples=(),
        heads=(),
        scores=(),
    )
    with pytest.raises(ValueError, match="block_ids"):
        run.runner.run(broken)
    rows = BranchRows(PROMPT[4:], 4, (Piece(0, 0, 7, (2, 5)),))
    (head,) = run.runner.run(batch_of([rows], block_size=4, heads=[2])).heads
    assert isinstance(head, Tensor)
    expected = run.expected(HandBranch(list(PROMPT)))[-1]
    torch.testing.assert_close(head, expected, rtol=0, atol=TOLERANCE)


def test_half_precision_heads_are_full_precision() -> None:
    """Catches heads kept in the model's dtype, which a sampler would then add up in."""
    run = HandForked(build_tiny_model("llama", dtype=torch.bfloat16))
    branch = run.create()
    batch = run.batch((branch, PROMPT), heads=[6], samples=[sample_of(6)])
    (head,) = run.runner.run(batch).heads
    assert isinstance(head, Tensor)
    assert head.dtype == torch.float32
    assert run.kv.layer(0)[0].dtype == torch.bfloat16
    expected = run.expected(branch)[-1].float()
    torch.testing.assert_close(head, expected, rtol=0, atol=0.1)


@pytest.mark.parametrize("is_whole", [False, True], ids=["layer by layer", "one native call"])
def test_what_may_be_done_meanwhile_is_done_once(is_whole: bool) -> None:
    """Catches a step that never says so: its tokens would reach nobody until the next one."""
    model = build_tiny_model("llama", hidden_size=64, intermediate_size=128, head_dim=16)
    run = HandForked(model)
    if is_whole:
        convert_weights(model, "int8", load_native())
    told: list[str] = []
    branch = run.create()
    run.runner.run(run.batch((branch, PROMPT), samples=[sample_of(6)]), lambda: told.append("rows"))
    head = torch.zeros(VOCAB_SIZE)
    asks_nothing_new = empty_batch(samples=[sample_of(None, head)])
    run.runner.run(asks_nothing_new, lambda: told.append("no rows"))
    assert told == ["rows", "no rows"]
