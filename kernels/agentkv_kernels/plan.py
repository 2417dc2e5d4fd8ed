"""AttentionPlan: which query rows read which runs of KV, as host integers.

Owns the work list all implementations start from and the rule of who sees what. It knows neither
tensors nor devices nor how an implementation groups the work; what one derives from a plan is kept
here, once per step, so that no layer repeats it.

    run    consecutive KV positions [start, end), the blocks that hold them, the rows that read them
    row    one query token; at position p its kv_len is p + 1
"""

from collections.abc import Callable, Hashable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple, Protocol, Self, TypeVar

import numpy as np
import numpy.typing as npt

_T = TypeVar("_T")


class Follower(Protocol):
    """What is derived from a plan and can move on with it."""

    def follow(self, plan: "AttentionPlan") -> bool:
        """Catches up with a plan that advanced; False, unchanged, where it cannot."""
        ...


_F = TypeVar("_F", bound=Follower)


class KVRun(NamedTuple):
    """KV positions [start, end), where they lie, and who reads them.

    Position p lies in block `block_ids[p // block_size - start // block_size]` at offset
    `p % block_size`: a run may begin and end inside a block. Ids beyond those that [start, end)
    needs are not read; they are kept for `AttentionPlan.advance`.
    """

    start: int
    end: int
    block_ids: Sequence[int]
    rows: Sequence[int]
    """Rows that list this run, strictly ascending; usually a range."""


class RunGrowth(NamedTuple):
    """A run that reaches further in a later step."""

    run: int
    """Index of the run in the plan."""
    end: int
    """New end, not below the old one."""
    block_ids: Sequence[int] = ()
    """Block ids appended to those the run had."""


class AttentionPlan:
    """Work list of one forward pass, reused until the topology changes.

    Row r attends, over all runs that list r, to positions [start, min(end, kv_lens[r])); with a
    sliding window only to those at or above kv_lens[r] - window. Since kv_lens[r] is the row's own
    position + 1, that bound is also the causality among a branch's new tokens. Runs of one row must
    be disjoint (unchecked: the cost would exceed the plan's). They need not cover [0, kv_lens[r]):
    a row that sees nothing gets zeros.

    Build it with `build`; `advance` refreshes it in place, so a model may hold on to one object.
    Treat the attributes as read-only. Not safe for use from several threads at once.
    """

    __slots__ = (
        "_current",
        "_derived",
        "_followers",
        "block_size",
        "blocks",
        "ends",
        "kv_lens",
        "rows",
        "starts",
    )

    def __init__(
        self,
        block_size: int,
        kv_lens: list[int],
        starts: list[int],
        ends: list[int],
        blocks: list[npt.NDArray[np.int32]],
        rows: list[Sequence[int]],
    ) -> None:
        """Takes over checked lists; callers use `build`."""
        self.block_size = block_size
        self.kv_lens = kv_lens
        """Per row: its position + 1."""
        self.starts = starts
        """Per run: first position."""
        self.ends = ends
        """Per run: one past the last position."""
        self.blocks = blocks
        """Per run: block ids, (num_ids,) int32."""
        self.rows = rows
        """Per run: a non-empty range, or an ascending tuple with gaps, or an empty range."""
        self._derived: dict[Hashable, Any] = {}
        self._followers: dict[Hashable, Any] = {}
        self._current: set[Hashable] = set()
        """Keys of the followers that caught up with the last `advance`."""

    @classmethod
    def build(cls, runs: Sequence[KVRun], kv_lens: Sequence[int], *, block_size: int) -> Self:
        """Checks the runs and makes a plan of them: one pass over the runs.

        Args:
            runs: What is read, by whom. A row's partial results are merged in this order, so list
                an ancestor before its descendants.
            kv_lens: Per row, its position + 1; 0 for a padding row, which no run needs to list.
            block_size: Token positions per block.

        Raises:
            ValueError: A run is not a range, lists too few blocks, a negative block, or rows that
                are not strictly ascending within [0, len(kv_lens)).
        """
        if block_size < 1:
            raise ValueError(f"block_size must be positive, not {block_size}")
        lens = list(kv_lens)
        if lens and min(lens) < 0:
            raise ValueError(f"kv_lens must not be negative, got {min(lens)}")
        blocks: list[npt.NDArray[np.int32]] = []
        rows: list[Sequence[int]] = []
        for index, run in enumerate(runs):
            if not 0 <= run.start <= run.end:
                raise ValueError(f"runs[{index}] is no range: [{run.start}, {run.end})")
            blocks.append(_as_ids(run.block_ids, index))
            _check_num_blocks(index, run.start, run.end, len(blocks[-1]), block_size)
            rows.append(_as_rows(run.rows, len(lens), index))
        starts, ends = [run.start for run in runs], [run.end for run in runs]
        return cls(block_size, lens, starts, ends, blocks, rows)

    def advance(self, kv_lens: Sequence[int], grown: Sequence[RunGrowth] = ()) -> None:
        """Moves the plan to a later step of the same topology, in place and without a rebuild.

        The result equals `build` on the grown runs. Rows, their number and who reads which run
        stay; a fork, a release or a copy-on-write needs a new plan. Raises before it changes
        anything.

        Args:
            kv_lens: Per row, its new position + 1.
            grown: Runs that reach further, each at most once.

        Raises:
            ValueError: Another number of rows, an unknown run, a run named twice, a run that
                shrinks, a run without the blocks its new end needs.
        """
        if len(kv_lens) != len(self.kv_lens):
            raise ValueError(f"kv_lens must have {len(self.kv_lens)} entries, not {len(kv_lens)}")
        if len(kv_lens) and min(kv_lens) < 0:
            raise ValueError(f"kv_lens must not be negative, got {min(kv_lens)}")
        if len({growth.run for growth in grown}) < len(grown):
            raise ValueError("grown must name each run at most once")
        appended = [self._check_growth(growth) for growth in grown]
        for growth, ids in zip(grown, appended, strict=True):
            self.ends[growth.run] = growth.end
            if len(ids):
                self.blocks[growth.run] = np.concatenate((self.blocks[growth.run], ids))
        self.kv_lens = list(kv_lens)
        self._derived.clear()
        self._current.clear()

    def _check_growth(self, growth: RunGrowth) -> npt.NDArray[np.int32]:
        """Returns the appended ids of a growth that fits its run."""
        run, end, block_ids = growth
        if not 0 <= run < len(self.ends):
            raise ValueError(f"grown names run {run} of {len(self.ends)}")
        if end < self.ends[run]:
            raise ValueError(f"grown shrinks run {run} from {self.ends[run]} to {end}")
        ids = _as_ids(block_ids, run)
        num_ids = len(self.blocks[run]) + len(ids)
        _check_num_blocks(run, self.starts[run], end, num_ids, self.block_size)
        return ids

    @property
    def num_rows(self) -> int:
        """Query rows the plan is for."""
        return len(self.kv_lens)

    @property
    def num_runs(self) -> int:
        """Runs listed, empty ones included."""
        return len(self.starts)

    def visible(self, run: int, row: int, window: int | None) -> tuple[int, int]:
        """Returns the positions [begin, end) of a run that a row listing it attends to.

        An empty range comes back as (begin, end) with end <= begin.
        """
        kv_len = self.kv_lens[row]
        begin = self.starts[run] if window is None else max(self.starts[run], kv_len - window)
        return begin, min(self.ends[run], kv_len)

    def highest_block(self) -> int:
        """Returns the highest block id that holds a position of a run; -1 when none does."""
        used = zip(self.blocks, self.starts, self.ends, strict=True)
        return max(
            (
                int(ids[: _num_needed(start, end, self.block_size)].max())
                for ids, start, end in used
                if start < end
            ),
            default=-1,
        )

    def slots(self, run: int, begin: int, end: int) -> npt.NDArray[np.int64]:
        """Returns the pool slots of positions [begin, end) of a run, (end - begin,) int64.

        A slot is block_id * block_size + offset. [begin, end) must lie within the run.
        """
        assert self.starts[run] <= begin <= end <= self.ends[run]
        if begin == end:
            return np.empty(0, np.int64)
        size = self.block_size
        first, last = begin // size, (end - 1) // size
        head = self.starts[run] // size
        ids = self.blocks[run][first - head : last + 1 - head].astype(np.int64)
        slots = ids[:, None] * size + np.arange(size)
        return slots.reshape(-1)[begin - first * size : end - first * size]

    def derived(self, make: Callable[..., _T], *arguments: Hashable) -> _T:
        """Returns `make(self, *arguments)`, computed once until the next `advance`.

        This is where an implementation keeps what depends on the plan but not on the layer. Layers
        with different windows get different results.
        """
        key = (make, *arguments)
        if key not in self._derived:
            self._derived[key] = make(self, *arguments)
        result: _T = self._derived[key]
        return result

    def followed(self, make: Callable[..., _F], *arguments: Hashable) -> _F:
        """Returns `make(self, *arguments)`, kept over `advance` for as long as it can follow.

        The counterpart of `derived` for what is dear to make and cheap to move on.
        """
        key = (make, *arguments)
        kept: _F | None = self._followers.get(key)
        if kept is None or (key not in self._current and not kept.follow(self)):
            kept = self._followers[key] = make(self, *arguments)
        self._current.add(key)
        return kept


def _as_ids(block_ids: Sequence[int], run: int) -> npt.NDArray[np.int32]:
    """Block ids as an array, none negative."""
    try:
        ids = np.asarray(block_ids, dtype=np.int32)
    except OverflowError as error:
        raise ValueError(f"block_ids of run {run} exceed 32 bits") from error
    if len(ids) and ids.min() < 0:
        raise ValueError(f"block_ids of run {run} must not be negative, got {ids.min()}")
    return ids


def _as_rows(rows: Sequence[int], num_rows: int, run: int) -> Sequence[int]:
    """Rows as a range where they are consecutive, else as a tuple; checked."""
    if not isinstance(rows, range):
        rows = tuple(rows)
        if any(row >= after for row, after in pairwise(rows)):
            raise ValueError(f"rows of run {run} must be strictly ascending")
        if rows and rows[-1] - rows[0] == len(rows) - 1:
            rows = range(rows[0], rows[-1] + 1)
    elif len(rows) > 1 and rows.step < 1:
        raise ValueError(f"rows of run {run} must be strictly ascending")
    if not rows:
        return range(0)
    if rows[0] < 0 or rows[-1] >= num_rows:
        raise ValueError(f"rows of run {run} must lie in [0, {num_rows}): {rows[0]}..{rows[-1]}")
    if isinstance(rows, range) and rows.step == 1:
        return rows
    return range(rows[0], rows[0] + 1) if len(rows) == 1 else tuple(rows)


def _num_needed(start: int, end: int, block_size: int) -> int:
    """Blocks that hold [start, end)."""
    return -(-end // block_size) - start // block_size if end > start else 0


def _check_num_blocks(run: int, start: int, end: int, num_blocks: int, block_size: int) -> None:
    """Refuses a run whose blocks end before it does."""
    needed = _num_needed(start, end, block_size)
    if num_blocks < needed:
        raise ValueError(
            f"block_ids of run {run} must hold {needed} blocks for [{start}, {end}), "
            f"not {num_blocks}"
        )
