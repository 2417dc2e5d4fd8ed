"""WorkList: a plan cut into the work items a GPU's programs take, as host arrays of int32.

Owns the splits along the KV, the tiles of rows, the order of items and the lists for the merge; and
how far a plan may advance before the cuts are wrong. It knows no device: `work_buffers` uploads it.

    item     one piece of a stretch x one tile of rows: ITEM_INTS numbers
    piece    positions [begin, cap) of a stretch, one program's loop
    tile     rows of one item; small (SMALL_TILE rows x heads) or large (LARGE_TILE)
    partial  result of one row from one item, merged with the row's others

    numbers of an item, filled up with zeros to 32 bytes
        q_begin, num_rows   its rows are q_rows[q_begin, q_begin + num_rows)
        block_offset        position p lies in block blocks[block_offset + p // block_size]
        begin, cap          it reads positions [begin, min(cap, its rows' longest kv_len))
        part                partial of its first row, the others follow; -1: it writes the output
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from agentkv_kernels.plan import AttentionPlan
from agentkv_kernels.stretches import Ints, Stretch, cut_stretches
from agentkv_kernels.work_options import (
    INVARIANT_SPLIT,
    LARGE_TILE,
    SMALL_TILE,
    TILE_TOKENS,
    WorkOptions,
)

ITEM_INTS = 8
MIN_SPLIT = 256
"""Least tokens of a piece: below, a program's fixed cost outweighs its loop."""
MAX_PIECES = 48
"""Pieces of the longest stretch at most, so that no row's merge gets long."""


class _Draft(NamedTuple):
    """An item before its place among the partials is known."""

    large: bool
    length: int
    q_begin: int
    num_rows: int
    block_offset: int
    begin: int
    cap: int


class WorkList:
    """One plan, cut for one kind of layer.

    Treat the attributes as read-only; `follow` keeps them in step with a plan that advances.
    """

    __slots__ = (
        "_caps",
        "_ends",
        "_frozen",
        "_growing_rows",
        "_growing_runs",
        "_places",
        "block_size",
        "blocks",
        "highest_block",
        "kv_lens",
        "large",
        "merge_begins",
        "merge_parts",
        "merge_rows",
        "new_blocks",
        "num_partials",
        "options",
        "q_rows",
        "small",
    )

    def __init__(self, plan: AttentionPlan, options: WorkOptions) -> None:
        """Cuts a plan.

        Args:
            plan: What is read, by whom.
            options: Sizes, window and policy.

        Raises:
            ValueError: An option makes no sense.
        """
        options.check()
        self.options = options
        self.block_size = plan.block_size
        self.kv_lens = np.asarray(plan.kv_lens, dtype=np.int32)
        """Per row: its position + 1."""
        self.highest_block = plan.highest_block()
        """Highest block id that is read, -1 if none."""
        cut = cut_stretches(plan, options)
        self._frozen = cut.frozen
        self._ends = np.asarray(plan.ends, dtype=np.int64)
        self.q_rows: Ints = _join([stretch.rows for stretch in cut.stretches])
        """Rows of all stretches, one after the other."""
        spaces = [_num_blocks(stretch, plan.block_size) for stretch in cut.stretches]
        self.blocks: Ints = np.zeros(sum(spaces), dtype=np.int32)
        """Block ids of all stretches, zero where none is known yet."""
        self.new_blocks: tuple[int, int] | None = None
        """The part of `blocks`, half-open, that the last `follow` wrote into."""
        self._caps = np.full(plan.num_runs, -1, dtype=np.int64)  # of growing runs, else -1
        self._places: dict[int, int] = {}  # of growing runs: where the first block stands
        self._place_blocks(cut.stretches, spaces, plan)
        growing = [stretch for stretch in cut.stretches if stretch.growing_run >= 0]
        self._growing_rows: Ints = _join([stretch.rows for stretch in growing])
        self._growing_runs: Ints = np.repeat(
            np.array([stretch.growing_run for stretch in growing], dtype=np.int32),
            [len(stretch.rows) for stretch in growing],
        )
        self._place_items(self._drafts(cut.stretches, spaces, plan.block_size), plan.num_rows)

    @property
    def num_rows(self) -> int:
        """Query rows the list is for."""
        return len(self.kv_lens)

    def follow(self, plan: AttentionPlan) -> bool:
        """Takes over the lengths and new blocks of the plan it was made of, after an `advance`.

        Returns:
            False when the cuts no longer fit: a reserve is used up, another run than a growing one
            grew, a length went down. Then nothing is changed, and a new list is needed.
        """
        kv_lens = np.asarray(plan.kv_lens, dtype=np.int32)
        assert len(kv_lens) == len(self.kv_lens), "another plan"
        if self._frozen and not np.array_equal(kv_lens, self.kv_lens):
            return False
        if (kv_lens < self.kv_lens).any():  # what a window had left behind may be seen again
            return False
        ends = np.asarray(plan.ends, dtype=np.int64)
        grown = np.flatnonzero(ends != self._ends)
        if (ends[grown] > self._caps[grown]).any():
            return False
        if (ends[self._growing_runs] < kv_lens[self._growing_rows]).any():
            return False  # a growing run's rows are bounded by their kv_len alone
        taken = [self._take_blocks(plan, int(run)) for run in grown]
        spans = [span for span in taken if span is not None]
        self.new_blocks = (min(spans)[0], max(last for _, last in spans)) if spans else None
        self._ends, self.kv_lens = ends, kv_lens
        return True

    def _take_blocks(self, plan: AttentionPlan, run: int) -> tuple[int, int] | None:
        """Copies the ids that a growing run reads from now on; returns where they went."""
        size, start = plan.block_size, plan.starts[run]
        first = -(-int(self._ends[run]) // size) - start // size
        last = -(-plan.ends[run] // size) - start // size
        if first == last:
            return None
        ids = plan.blocks[run][first:last]
        place = self._places[run]
        self.blocks[place + first : place + last] = ids
        self.highest_block = max(self.highest_block, int(ids.max()))
        return place + first, place + last

    def _place_blocks(
        self, stretches: Sequence[Stretch], spaces: Sequence[int], plan: AttentionPlan
    ) -> None:
        """Fills in the block ids, and notes how far growing runs may go and where their ids go."""
        size, place = plan.block_size, 0
        for stretch, space in zip(stretches, spaces, strict=True):
            used = -(-stretch.end // size) - stretch.begin // size
            self.blocks[place : place + used] = stretch.blocks[:used]
            run = stretch.growing_run
            if run >= 0:
                self._caps[run] = stretch.cap
                self._places[run] = place + plan.starts[run] // size - stretch.begin // size
            place += space

    def _drafts(
        self, stretches: Sequence[Stretch], spaces: Sequence[int], block_size: int
    ) -> list[_Draft]:
        """Cuts the stretches into items, in the order of merging."""
        options = self.options
        split = self._split(stretches)
        drafts: list[_Draft] = []
        q_begin = place = 0
        for stretch, space in zip(stretches, spaces, strict=True):
            rows, offset = stretch.rows, place - stretch.begin // block_size
            large = options.batch_invariant or len(rows) * options.heads_per_tile > SMALL_TILE
            step = _rows_per_tile(options, large=large)
            for begin, cap in self._pieces(stretch, split):
                length = min(cap, stretch.end) - begin
                for first in range(0, len(rows), step):
                    tile = rows[first : first + step]
                    if self._sees(tile, begin, cap):
                        at = q_begin + first
                        drafts.append(_Draft(large, length, at, len(tile), offset, begin, cap))
            q_begin += len(rows)
            place += space
        return drafts

    def _split(self, stretches: Sequence[Stretch]) -> int:
        """Chooses the length of pieces: enough of them for every program, and no more."""
        options = self.options
        if options.batch_invariant:
            return options.split_tokens or INVARIANT_SPLIT
        if options.split_tokens is not None:
            return options.split_tokens
        work = longest = 0
        for stretch in stretches:
            tiles = -(-len(stretch.rows) // _rows_per_tile(options, large=True))
            work += (stretch.end - stretch.begin) * tiles
            longest = max(longest, stretch.end - stretch.begin)
        share = work * options.num_kv_heads // (options.num_programs * 2)
        split = max(MIN_SPLIT, share, longest // MAX_PIECES)
        return -(-split // TILE_TOKENS) * TILE_TOKENS

    def _pieces(self, stretch: Stretch, split: int) -> list[tuple[int, int]]:
        """Cuts a stretch into [begin, cap) pieces, the last one with the reserve."""
        begin, end = stretch.begin, stretch.end
        if self.options.batch_invariant:
            inner = list(range(begin // split * split + split, stretch.cap, split))
        else:
            count = max(1, -(-(end - begin) // split))
            step = -(-(end - begin) // (count * TILE_TOKENS)) * TILE_TOKENS
            inner = list(range(begin + step, end, step)) if step else []
        return list(zip([begin, *inner], [*inner, stretch.cap], strict=True))

    def _sees(self, rows: Ints, begin: int, cap: int) -> bool:
        """Whether a tile has anything to read in a piece now; remembers if that may change."""
        lens = self.kv_lens[rows]
        window = self.options.window
        if window is not None and int(lens.min()) - window >= cap:
            return False
        if int(lens.max()) <= begin:
            self._frozen = True
            return False
        return True

    def _place_items(self, drafts: Sequence[_Draft], num_rows: int) -> None:
        """Gives every item its partials, lists what each row merges, and orders the items."""
        table = np.array(drafts, dtype=np.int32).reshape(-1, len(_Draft._fields))
        large, length, q_begin, counts = table[:, 0], table[:, 1], table[:, 2], table[:, 3]
        first = np.cumsum(counts) - counts  # of an item among all (item, row) pairs
        inner = np.arange(int(counts.sum()), dtype=np.int64) - np.repeat(first, counts)
        pair_rows = self.q_rows[np.repeat(q_begin, counts) + inner]
        per_row = np.bincount(pair_rows, minlength=num_rows)
        alone = np.ones(len(table), dtype=bool)  # items whose rows have no other item
        if len(table):
            alone = np.maximum.reduceat(per_row[pair_rows], first) == 1
        kept = np.where(alone, 0, counts)
        parts = np.where(alone, -1, np.cumsum(kept) - kept)
        merged = pair_rows[np.repeat(~alone, counts)]
        self.num_partials = len(merged)
        """Partials of all rows."""
        self.merge_parts: Ints = np.argsort(merged, kind="stable").astype(np.int32)
        """Partials of merged rows, row by row, ancestors first."""
        directly = np.zeros(num_rows, dtype=bool)
        directly[pair_rows[np.repeat(alone, counts)]] = True
        self.merge_rows: Ints = np.flatnonzero(~directly).astype(np.int32)
        """Rows that no item writes directly, those that see nothing included."""
        num_parts = np.bincount(merged, minlength=num_rows)[self.merge_rows]
        self.merge_begins: Ints = np.concatenate(([0], np.cumsum(num_parts))).astype(np.int32)
        """Row merge_rows[i] merges merge_parts[merge_begins[i], merge_begins[i + 1])."""
        items = np.zeros((len(table), ITEM_INTS), dtype=np.int32)
        items[:, :5] = table[:, 2:]
        items[:, 5] = parts
        order = np.argsort(-length, kind="stable")  # the longest first: short ones fill the end
        self.small: Ints = items[order[large[order] == 0]]
        """Items of the small class, (n, ITEM_INTS)."""
        self.large: Ints = items[order[large[order] == 1]]
        """Items of the large class, (n, ITEM_INTS)."""


def _rows_per_tile(options: WorkOptions, *, large: bool) -> int:
    """Rows that fit one tile with all their heads."""
    return max(1, (LARGE_TILE if large else SMALL_TILE) // options.heads_per_tile)


def _num_blocks(stretch: Stretch, block_size: int) -> int:
    """Blocks that hold a stretch and its reserve."""
    return -(-stretch.cap // block_size) - stretch.begin // block_size


def _join(arrays: Sequence[Ints]) -> npt.NDArray[np.int32]:
    return np.concatenate(arrays) if arrays else np.empty(0, dtype=np.int32)
