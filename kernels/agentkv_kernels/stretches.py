"""Which rows read which stretch of KV together: the decision, per run, whether sharing pays.

Runs of a plan form trees. Sharing a run reads it once but gives each of its rows one more partial
result; inlining it hands its KV down to the runs below, which then read it once each, as part of
their own. This file walks the trees from the roots and decides by bytes. How a stretch becomes
programs is `work_list`'s.

    stretch   consecutive positions with one block table, read by one group of rows
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from agentkv_kernels.plan import AttentionPlan
from agentkv_kernels.work_options import INVARIANT_SPLIT, TILE_TOKENS, WorkOptions

Ints = npt.NDArray[np.int32]

FIXED_COST_TOKENS = 64
"""What a group of programs and a merge cost besides partial results, in tokens read: below this
nothing is shared. An estimate, to be measured."""


class Stretch(NamedTuple):
    """Positions [begin, end) for a group of rows, with room up to `cap`."""

    rows: Ints
    """Rows that read it."""
    begin: int
    end: int
    """One past the last position any row reads now."""
    cap: int
    """One past the last position the kernel may read once rows' kv_lens allow it."""
    blocks: Ints
    """Block ids from the block of `begin` on; fewer than `cap` needs where they are not known."""
    growing_run: int
    """The run whose growth this stretch may follow, or -1."""


class Cut(NamedTuple):
    """All stretches of a plan."""

    stretches: list[Stretch]
    """Ancestors before descendants: the order of each row's merge."""
    frozen: bool
    """Rows were left out because of their present kv_len: only these kv_lens fit."""


def cut_stretches(plan: AttentionPlan, options: WorkOptions) -> Cut:
    """Decides for each run who reads it, and how far each group reads.

    In batch-invariant mode nothing is decided: whole pieces at absolute multiples of the split are
    shared by all rows of a run, the rest goes down, so that no row's cuts depend on other rows.
    """
    return _Cutter(plan, options).cut()


class _Cutter:
    """The walk."""

    def __init__(self, plan: AttentionPlan, options: WorkOptions) -> None:
        self.plan = plan
        self.options = options
        self.kv_lens = np.asarray(plan.kv_lens, dtype=np.int32)
        self.stretches: list[Stretch] = []
        self.frozen = False

    def cut(self) -> Cut:
        plan, size = self.plan, self.plan.block_size
        children = self._children()
        inherited: dict[int, tuple[int, Ints]] = {}
        for run in range(plan.num_runs):
            if run not in children:
                continue
            start, end, blocks = plan.starts[run], plan.ends[run], plan.blocks[run]
            begin = start
            if run in inherited:
                begin, above = inherited.pop(run)
                blocks = np.concatenate((above[: start // size - begin // size], blocks))
            rows = _as_array(plan.rows[run])
            below = children[run]
            if not below:
                self._emit(rows, begin, end, blocks, run)
                continue
            ending = self._ending(rows, below)
            num_groups = len(below) + (len(ending) > 0)
            cut = self._cut_at(begin, end, len(rows), num_groups)
            first = cut // size - begin // size
            if cut > begin:
                self._emit(rows, begin, cut, blocks, -1)
            if cut < end:
                if len(ending):
                    self._emit(ending, cut, end, blocks[first:], -1)
                inherited |= dict.fromkeys(below, (cut, blocks[first:]))
        return Cut(self.stretches, self.frozen)

    def _children(self) -> dict[int, list[int]]:
        """Lists for each run that holds something the runs that continue it, for all their rows."""
        plan = self.plan
        last = np.full(plan.num_rows, -1, dtype=np.int32)  # per row, the run it read last
        children: dict[int, list[int]] = {}
        for run in range(plan.num_runs):
            rows = plan.rows[run]
            if not rows or plan.starts[run] == plan.ends[run]:
                continue
            children[run] = []
            index = slice(rows[0], rows[-1] + 1) if isinstance(rows, range) else list(rows)
            above = last[index]
            parent = int(above[0])
            if parent >= 0 and (above == parent).all() and self._continues(parent, run):
                children[parent].append(run)
            last[index] = run
        return children

    def _continues(self, parent: int, run: int) -> bool:
        """Whether one block table can hold both: a block they meet in must be the same block."""
        plan, start = self.plan, self.plan.starts[run]
        if plan.ends[parent] != start:
            return False
        if start % plan.block_size == 0:
            return True
        last = start // plan.block_size - plan.starts[parent] // plan.block_size
        return bool(plan.blocks[parent][last] == plan.blocks[run][0])

    def _ending(self, rows: Ints, below: Sequence[int]) -> Ints:
        """Rows that no run below continues."""
        continued = [_as_array(self.plan.rows[child]) for child in below]
        if sum(map(len, continued)) == len(rows):
            return rows[:0]
        return np.setdiff1d(rows, np.concatenate(continued), assume_unique=True)

    def _cut_at(self, begin: int, end: int, num_rows: int, num_groups: int) -> int:
        """Says up to where [begin, end) is read by all rows together; the rest goes down."""
        options = self.options
        if options.batch_invariant:
            split = options.split_tokens or INVARIANT_SPLIT
            return max(begin, end // split * split)
        if options.sharing != "cost":
            return end if options.sharing == "all" else begin
        saved = (num_groups - 1) * (end - begin) * options.token_bytes
        cost = num_rows * options.partial_bytes + FIXED_COST_TOKENS * options.token_bytes
        return end if saved > cost else begin

    def _emit(self, rows: Ints, begin: int, end: int, blocks: Ints, leaf_run: int) -> None:
        """Adds a stretch for those of the rows that see some of it."""
        options, size = self.options, self.plan.block_size
        cap, growing_run = end, -1
        if leaf_run >= 0 and options.reserve and int(self.kv_lens[rows].max()) == end:
            growing_run = leaf_run
            cap = self._reserve_to(end)
        sees = self.kv_lens[rows] > begin
        if not sees.all():
            rows, self.frozen = rows[sees], True
        if options.window is None:
            groups = [rows] if len(rows) else []
        else:
            groups = _overlapping(rows, self.kv_lens, end, options.window)
            growing_run, cap = (growing_run, cap) if len(groups) == 1 else (-1, end)
        for group in groups:
            low, known = begin, blocks
            if options.window is not None:
                low = self._reached(begin, int(self.kv_lens[group].min()) - options.window)
                known = blocks[low // size - begin // size :]
            seen_end = min(end, int(self.kv_lens[group].max()))
            self.stretches.append(Stretch(group, low, seen_end, cap, known, growing_run))

    def _reached(self, begin: int, lowest: int) -> int:
        """Where a stretch may begin if its windows reach down to `lowest`."""
        options = self.options
        grain = self.plan.block_size
        if options.batch_invariant:
            grain = options.split_tokens or INVARIANT_SPLIT
        return max(begin, lowest // grain * grain)

    def _reserve_to(self, end: int) -> int:
        """How far a stretch that ends at `end` may grow within one work list."""
        options = self.options
        if options.batch_invariant:  # a piece of its own begins at the next multiple
            split = options.split_tokens or INVARIANT_SPLIT
            return min(end + options.reserve, -(-end // split) * split)
        return -(-(end + options.reserve) // TILE_TOKENS) * TILE_TOKENS


def _overlapping(rows: Ints, kv_lens: Ints, end: int, window: int) -> list[Ints]:
    """Groups rows whose windows below `end` leave no gap: what lies in one may be anything."""
    rows = rows[kv_lens[rows] - window < end]
    if not len(rows):
        return []
    rows = rows[np.argsort(kv_lens[rows], kind="stable")]
    gaps = np.flatnonzero(np.diff(kv_lens[rows]) > window) + 1
    return np.split(rows, gaps)


def _as_array(rows: Sequence[int]) -> Ints:
    if isinstance(rows, range):
        return np.arange(rows.start, rows.stop, dtype=np.int32)
    return np.asarray(rows, dtype=np.int32)
