"""How a plan's work is cut into calls on a CPU: made once per step, used by every layer.

Owns the decision per run whether sharing pays, and the index tensors and masks that follow from it.
It knows neither queries nor caches; `cpu` executes what stands here.

    Piece    some rows, one set of slots, one call; with a mask where rows see different parts
    Tails    rows with few KV tokens of their own, padded to one batch
    level    place of a row's partial result in the merge; each row has at most one per level
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from agentkv_kernels.plan import AttentionPlan

_Ints = npt.NDArray[np.int64]

SHARE_CALL_TOKENS = 128
SHARE_ROW_TOKENS = 12
"""What a call of its own and the merge of its rows cost, in tokens gathered and attended to in the
padded batch: where the two broke even on one thread, 2 to 32 rows, 9/3 heads of 64."""
IN_PLACE_MIN_TOKENS = 192
"""Consecutive slots from which on a call of its own, without a gather, beats the padded batch."""
MAX_PADDING = 512
"""Padding tokens in one batch of tails, about the cost of another batch."""


class Piece(NamedTuple):
    """One call: rows that read the same slots."""

    level: int
    rows: slice | Tensor
    """Rows, a slice or (num_rows,) int64."""
    slots: slice | Tensor
    """Slots, a slice or (num_kv,) int64."""
    causal: bool = False
    """The i-th row sees the first i + 1 slots; there are as many rows as slots."""
    mask: Tensor | None = None
    """(num_rows, num_kv), 0 where a row sees a slot, else -inf; every slot is seen by a row."""


class Tails(NamedTuple):
    """One padded batch: each row reads its own slots."""

    level: int
    rows: slice | Tensor
    """Rows, a slice or (num_rows,) int64."""
    slots: Tensor
    """(num_rows * num_kv,) int64; padding repeats a slot the same row sees."""
    mask: Tensor | None
    """(num_rows, 1, 1, num_kv), -inf at the padding; None where nothing is padded."""


class Schedule(NamedTuple):
    """Everything a layer does for one plan and window."""

    pieces: tuple[Piece, ...]
    tails: tuple[Tails, ...]
    num_levels: int
    complete: bool
    """Every row has a partial result at every level."""
    empty_rows: bool
    """Some row sees nothing."""

    @property
    def reads_hidden(self) -> bool:
        """Whether a call loads slots that one of its rows does not see."""
        return any(piece.causal or piece.mask is not None for piece in self.pieces)


def build_schedule(plan: AttentionPlan, window: int | None, dtype: torch.dtype) -> Schedule:
    """Cuts a plan's work; masks get `dtype`."""
    cutter = _Cutter(plan, window, dtype)
    for run in range(plan.num_runs):
        if len(plan.rows[run]) == 1:
            cutter.cut_single(run)
        elif plan.rows[run]:
            cutter.cut_group(run)
    cutter.cut_private()
    levels = cutter.levels
    num_levels = max(levels, default=0)
    return Schedule(
        tuple(cutter.pieces),
        tuple(cutter.tails),
        num_levels,
        complete=cutter.num_partials == num_levels * plan.num_rows,
        empty_rows=min(levels, default=0) == 0,
    )


class _Cutter:
    """The schedule under construction."""

    def __init__(self, plan: AttentionPlan, window: int | None, dtype: torch.dtype) -> None:
        self.plan = plan
        self.window = window
        self.dtype = dtype
        self.kv_lens = np.asarray(plan.kv_lens, dtype=np.int64)
        self.levels = [0] * plan.num_rows
        """Per row, levels taken so far."""
        self.num_partials = 0
        self.pieces: list[Piece] = []
        self.tails: list[Tails] = []
        self.private: dict[int, list[_Ints]] = {}
        """Per row, slots for the padded batches."""

    def cut_single(self, run: int) -> None:
        """Handles a run that one row reads."""
        row = self.plan.rows[run][0]
        begin, end = self.plan.visible(run, row, self.window)
        if begin < end:
            self._add_private(row, self.plan.slots(run, begin, end))

    def cut_group(self, run: int) -> None:
        """Handles a run that several rows read: what all see is shared, if that pays."""
        plan = self.plan
        listed = plan.rows[run]
        begin, end = plan.starts[run], plan.ends[run]
        if self.window is None and all(plan.kv_lens[row] >= end for row in listed):
            if begin < end:
                self._add_seen_by_all(listed, plan.slots(run, begin, end))
            return
        self._cut_partly_seen(run, listed)

    def _add_seen_by_all(self, rows: Sequence[int], slots: _Ints) -> None:
        """Adds slots to share where that pays, else to each row's own."""
        if _sharing_pays(len(rows), (len(rows) - 1) * len(slots)):
            self._add_shared(rows, slots)
        else:
            for row in rows:
                self._add_private(row, slots)

    def _cut_partly_seen(self, run: int, listed: Sequence[int]) -> None:
        """Handles a run of which not every row sees everything."""
        plan = self.plan
        if isinstance(listed, range):
            rows = np.arange(listed[0], listed[-1] + 1)
        else:
            rows = np.asarray(listed, dtype=np.int64)
        kv_lens = self.kv_lens[rows]
        ends = np.minimum(kv_lens, plan.ends[run])
        begins = np.full_like(ends, plan.starts[run])
        if self.window is not None:
            np.maximum(begins, kv_lens - self.window, out=begins)
        sees = begins < ends
        if not sees.all():
            rows, begins, ends = rows[sees], begins[sees], ends[sees]
            if not len(rows):
                return
        low, high = int(begins.max()), int(ends.min())
        if self._is_causal(begins, ends):
            # The first row's own position belongs to the triangle.
            if low < high - 1:
                self._add_shared(rows, plan.slots(run, low, high - 1))
            triangle = plan.slots(run, high - 1, int(ends[-1]))
            self._add_piece(rows, _as_index(triangle), causal=True)
            return
        if _sharing_pays(len(rows), (len(rows) - 1) * (high - low)):
            self._add_shared(rows, plan.slots(run, low, high))
        else:
            high = low
        if (begins < low).any() or (ends > high).any():
            self._cut_ragged(run, rows, begins, ends, (low, high))

    @staticmethod
    def _is_causal(begins: _Ints, ends: _Ints) -> bool:
        """Whether each row sees one position more than the row before: a chunk of one branch."""
        num_rows = len(ends)
        return (
            _sharing_pays(num_rows, num_rows * (num_rows - 1) // 2)
            and bool((begins == begins[0]).all())
            and bool((np.diff(ends) == 1).all())
        )

    def _cut_ragged(
        self, run: int, rows: _Ints, begins: _Ints, ends: _Ints, done: tuple[int, int]
    ) -> None:
        """Handles positions [begin, end) of each row outside of `done`: some rows see them."""
        low, high = done
        first, last = int(begins.min()), int(ends.max())
        if first == low:
            first = high
        if last == high:
            last = low
        positions = np.arange(first, last)
        sees = (positions >= begins[:, None]) & (positions < ends[:, None])
        sees &= (positions < low) | (positions >= high)
        wanted = sees.any(0)
        slots = self.plan.slots(run, first, last)
        if not _sharing_pays(len(rows), int(sees.sum()) - int(wanted.sum())):
            for row, seen in zip(rows, sees, strict=True):
                if seen.any():
                    self._add_private(int(row), slots[seen])
            return
        busy = sees.any(1)
        mask = self._mask(sees[busy][:, wanted])
        self._add_piece(rows[busy], _as_index(slots[wanted]), mask=mask)

    def cut_private(self) -> None:
        """Turns the rows' own slots into padded batches of similar lengths."""
        rows = sorted(self.private, key=lambda row: (-sum(map(len, self.private[row])), row))
        lists = [_join(self.private[row]) for row in rows]
        first = 0
        while first < len(rows):
            last, padding, width = first + 1, 0, len(lists[first])
            while last < len(rows) and padding + width - len(lists[last]) <= MAX_PADDING:
                padding += width - len(lists[last])
                last += 1
            self._add_tails(rows[first:last], lists[first:last], padded=padding > 0)
            first = last

    def _add_shared(self, rows: Sequence[int] | _Ints, slots: _Ints) -> None:
        """Adds what all rows see: long stretches in place, the rest gathered."""
        for stretch in _stretches(slots):
            self._add_piece(rows, _as_index(stretch))

    def _add_private(self, row: int, slots: _Ints) -> None:
        """Adds what one row sees: long stretches in place, the rest to its padded batch."""
        for stretch in _stretches(slots) if len(slots) >= IN_PLACE_MIN_TOKENS else [slots]:
            index = _as_index(stretch)
            if isinstance(index, slice) and len(stretch) >= IN_PLACE_MIN_TOKENS:
                self._add_piece([row], index)
            else:
                self.private.setdefault(row, []).append(stretch)

    def _add_piece(
        self,
        rows: Sequence[int] | _Ints,
        slots: slice | Tensor,
        *,
        causal: bool = False,
        mask: Tensor | None = None,
    ) -> None:
        self.pieces.append(Piece(self._take_level(rows), _as_index(rows), slots, causal, mask))

    def _add_tails(self, rows: list[int], lists: list[_Ints], *, padded: bool) -> None:
        """Adds one padded batch; one row alone needs none."""
        if len(rows) == 1:
            self._add_piece(rows, _as_index(lists[0]))
            return
        order = np.argsort(rows)
        rows, lists = [rows[i] for i in order], [lists[i] for i in order]
        lengths = np.fromiter(map(len, lists), np.int64, len(lists))
        width = int(lengths.max())
        mask = None
        if padded:
            # Padding with a slot the row sees: what nobody owns may be NaN, and 0 x NaN is NaN.
            table = np.empty((len(rows), width), np.int64)
            for line, slots in zip(table, lists, strict=True):
                line[: len(slots)] = slots
                line[len(slots) :] = slots[0]
            mask = self._mask(np.arange(width) < lengths[:, None])[:, None, None]
        else:
            table = np.stack(lists)
        flat = torch.from_numpy(table.reshape(-1))
        self.tails.append(Tails(self._take_level(rows), _as_index(rows), flat, mask))

    def _take_level(self, rows: Sequence[int] | _Ints) -> int:
        """Returns the first level that is free for all rows, and takes it."""
        level = max(self.levels[row] for row in rows)
        for row in rows:
            self.levels[row] = level + 1
        self.num_partials += len(rows)
        return level

    def _mask(self, sees: npt.NDArray[np.bool_]) -> Tensor:
        """Turns visibility into what is added to scores."""
        mask = torch.zeros(sees.shape, dtype=self.dtype)
        return mask.masked_fill_(torch.from_numpy(~sees), -torch.inf)


def _sharing_pays(num_rows: int, num_saved: int) -> bool:
    """Whether a call of its own is worth not reading `num_saved` tokens again."""
    return num_saved >= SHARE_CALL_TOKENS + SHARE_ROW_TOKENS * num_rows


def _join(parts: list[_Ints]) -> _Ints:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _as_index(numbers: Sequence[int] | _Ints) -> slice | Tensor:
    """A slice where the numbers (if a range, of step 1) are consecutive, else an int64 tensor."""
    if isinstance(numbers, range):
        return slice(numbers.start, numbers.stop)
    array = np.asarray(numbers, dtype=np.int64)
    first, count = int(array[0]), len(array)
    if int(array[-1]) - first == count - 1 and (count < 3 or bool((np.diff(array) == 1).all())):
        return slice(first, first + count)
    return torch.from_numpy(array)


def _stretches(slots: _Ints) -> list[_Ints]:
    """Splits slots into long consecutive stretches, and one list of all that lies between."""
    breaks = np.flatnonzero(np.diff(slots) != 1) + 1
    if not len(breaks):
        return [slots]
    bounds = [0, *breaks.tolist(), len(slots)]
    spans = list(pairwise(bounds))
    long = [slots[a:b] for a, b in spans if b - a >= IN_PLACE_MIN_TOKENS]
    rest = [slots[a:b] for a, b in spans if b - a < IN_PLACE_MIN_TOKENS]
    return [*long, _join(rest)] if rest else long
