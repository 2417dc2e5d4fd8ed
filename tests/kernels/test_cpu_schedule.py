"""What the CPU reads per step: shared KV once, and nothing gathered that lies in order."""

import torch

from agentkv_kernels import AttentionPlan, KVRun
from agentkv_kernels.cpu_schedule import Schedule, build_schedule


def schedule(
    runs: list[KVRun], kv_lens: list[int], *, block_size: int = 16, window: int | None = None
) -> Schedule:
    plan = AttentionPlan.build(runs, kv_lens, block_size=block_size)
    return build_schedule(plan, window, torch.float32)


def num_read(result: Schedule) -> int:
    """KV tokens read by all calls, padding included."""
    pieces = sum(
        p.slots.stop - p.slots.start if isinstance(p.slots, slice) else len(p.slots)
        for p in result.pieces
    )
    return pieces + sum(len(tails.slots) for tails in result.tails)


def test_shared_prefix_is_read_once_in_place() -> None:
    """Catches the promise broken: cost must follow distinct KV, not branches x length."""
    runs = [KVRun(0, 2048, range(128), range(16))]
    runs += [KVRun(2048, 2112, range(128 + 4 * r, 132 + 4 * r), range(r, r + 1)) for r in range(16)]
    result = schedule(runs, [2112] * 16)
    (piece,) = result.pieces
    assert (piece.rows, piece.slots) == (slice(0, 16), slice(0, 2048))
    (tails,) = result.tails
    assert (tails.rows, tails.mask) == (slice(0, 16), None)
    assert num_read(result) == 2048 + 16 * 64
    assert result.num_levels == 2
    assert result.complete
    assert not result.reads_hidden


def test_every_level_of_a_deep_tree_is_read_once() -> None:
    """Catches sharing that stops below the first fork."""
    runs = [KVRun(0, 1024, range(64), range(8))]
    runs += [
        KVRun(1024, 1536, range(64 + 32 * i, 96 + 32 * i), range(4 * i, 4 * i + 4))
        for i in range(2)
    ]
    runs += [KVRun(1536, 1552, [128 + r], range(r, r + 1)) for r in range(8)]
    result = schedule(runs, [1552] * 8)
    assert num_read(result) == 1024 + 2 * 512 + 8 * 16
    assert result.num_levels == 3


def test_short_shared_runs_are_not_worth_a_call() -> None:
    """Catches many tiny calls, dearer than reading a few tokens twice."""
    runs = [KVRun(0, 16, [0], range(4))]
    runs += [KVRun(16, 32, [1 + r], range(r, r + 1)) for r in range(4)]
    result = schedule(runs, [32] * 4)
    assert not result.pieces
    assert len(result.tails) == 1


def test_a_chunk_is_one_square_and_what_lies_before() -> None:
    """Catches a prefill that masks a rectangle it need not compute."""
    result = schedule([KVRun(0, 1024, range(64), range(256))], list(range(769, 1025)))
    before, own = result.pieces
    assert (before.slots, before.causal, before.mask) == (slice(0, 768), False, None)
    assert (own.slots, own.causal) == (slice(768, 1024), True)
    assert result.reads_hidden


def test_scattered_blocks_are_gathered_once_for_all_rows() -> None:
    """Catches a gather per row where ids are not consecutive."""
    runs = [KVRun(0, 512, range(0, 64, 2), range(8))]
    result = schedule(runs, [512] * 8)
    (piece,) = result.pieces
    assert isinstance(piece.slots, torch.Tensor)
    assert num_read(result) == 512


def test_long_stretches_stay_in_place() -> None:
    """Catches a whole run gathered because of one gap in its ids."""
    runs = [KVRun(0, 544, [*range(16), 40, *range(20, 37)], range(8))]
    result = schedule(runs, [544] * 8)
    assert [p.slots for p in result.pieces[:2]] == [slice(0, 256), slice(320, 592)]
    assert num_read(result) == 544


def test_uneven_tails_are_padded_within_bounds() -> None:
    """Catches one long branch making all short ones pay for its length."""
    lengths = [150, 150, 3, 2, 1, 9, 7, 5]
    runs = [KVRun(0, n, range(10 * i, 10 * i + 10), [i]) for i, n in enumerate(lengths)]
    result = schedule(runs, lengths)
    assert num_read(result) <= sum(lengths) + 512 * len(result.tails)
    assert len(result.tails) == 2


def test_what_no_window_reaches_is_not_read() -> None:
    """Catches a window that only masks, and so still costs the whole prefix."""
    runs = [KVRun(0, 4096, range(256), range(8))]
    runs += [KVRun(4096, 4112, [256 + r], [r]) for r in range(8)]
    result = schedule(runs, [4112] * 8, window=512)
    assert num_read(result) == 512 - 16 + 8 * 16


def test_a_window_over_a_chunk_reads_each_position_once() -> None:
    """Catches what all rows see being read again where they differ, at either end."""
    result = schedule([KVRun(0, 300, range(19), range(60))], list(range(241, 301)), window=150)
    shared, ragged = result.pieces
    assert shared.slots == slice(150, 241)
    assert ragged.mask is not None
    assert num_read(result) == 300 - 91


def test_positions_between_two_windows_are_not_read() -> None:
    """Catches slots loaded though no row sees them: they may hold anything."""
    kv_lens = [*range(101, 141), *range(901, 941)]
    result = schedule([KVRun(0, 940, range(59), range(80))], kv_lens, window=30)
    assert num_read(result) == 2 * (30 + 39)
