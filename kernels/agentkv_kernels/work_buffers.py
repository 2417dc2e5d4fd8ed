"""WorkBuffers: a work list on a device, in one int32 buffer at a fixed address.

Owns the layout of that buffer, its capacity, and the uploads: one copy from pinned memory for a new
list, one or two short ones when a list moves on. Kernels read counts from the buffer itself, so a
captured graph stays valid while lists come and go. It decides nothing about the work.

    counts | kv_lens | small | large | q_rows | blocks | merge_rows | merge_begins | merge_parts
"""

from typing import NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from agentkv_kernels.plan import AttentionPlan
from agentkv_kernels.stretches import Ints
from agentkv_kernels.work_list import ITEM_INTS, WorkList
from agentkv_kernels.work_options import WorkOptions

COUNT_INTS = 16
"""Room for counts: items of the small and of the large class, rows to merge."""


def bucket(count: int) -> int:
    """Rounds a count up to a power of two, at least 16; 0 stays 0."""
    return 0 if count == 0 else max(16, 1 << (count - 1).bit_length())


class Buckets(NamedTuple):
    """How many programs a launch starts: part of a graph's key, with the number of rows."""

    small: int
    large: int
    merge: int
    partials: int

    @classmethod
    def of(cls, work: WorkList) -> Self:
        """The smallest that serve a list."""
        counts = (len(work.small), len(work.large), len(work.merge_rows), work.num_partials)
        return cls(*map(bucket, counts))


class Capacity(NamedTuple):
    """Room of each part of the buffer."""

    rows: int
    small: int
    large: int
    q_rows: int
    blocks: int
    partials: int

    @classmethod
    def of(cls, work: WorkList) -> Self:
        """Room for a list, rounded up to buckets."""
        lengths = (work.num_rows, len(work.small), len(work.large), len(work.q_rows))
        return cls(*map(bucket, (*lengths, len(work.blocks), work.num_partials)))

    def holds(self, work: WorkList) -> bool:
        """Whether a list fits."""
        needed = (
            work.num_rows,
            len(work.small),
            len(work.large),
            len(work.q_rows),
            len(work.blocks),
            work.num_partials,
        )
        return all(have >= need for have, need in zip(self, needed, strict=True))


class WorkBuffers:
    """The current work list, on the host and on a device.

    Not safe for use from several threads. Uploads are ordered by the current stream: a kernel
    launched before a `load` or `follow` still reads the old list.
    """

    def __init__(
        self, options: WorkOptions, capacity: Capacity, device: torch.device | str
    ) -> None:
        """Allocates room; `load` fills it.

        Args:
            options: How plans are cut.
            capacity: Room; lists that need more are refused by `load`.
            device: Where the kernels run.
        """
        self.options = options
        self.capacity = capacity
        self._offsets, size = _layout(capacity)
        self._device = torch.zeros(size, dtype=torch.int32, device=device)
        self._staging = _Staging(size, pinned=self._device.is_cuda)
        self._plan: AttentionPlan | None = None
        self._work: WorkList | None = None

    @classmethod
    def of(cls, plan: AttentionPlan, options: WorkOptions, device: torch.device) -> Self:
        """Makes buffers that fit one plan, filled; what `AttentionPlan.followed` takes."""
        work = WorkList(plan, options)
        buffers = cls(options, Capacity.of(work), device)
        buffers._upload(plan, work)
        return buffers

    @property
    def work(self) -> WorkList:
        """The list that was loaded last."""
        assert self._work is not None, "nothing was loaded"
        return self._work

    @property
    def buckets(self) -> Buckets:
        """How many programs to start for the list that was loaded last."""
        return Buckets.of(self.work)

    def part(self, name: str) -> Tensor:
        """Returns a view of one part of the device's buffer: `counts`, or a `WorkList` array."""
        begin, end = self._offsets[name]
        return self._device[begin:end]

    def load(self, plan: AttentionPlan) -> bool:
        """Brings the buffers in step with a plan, by the shortest way.

        Returns:
            False when the plan needs more room than there is; then nothing is changed.
        """
        if self._plan is plan and self.follow(plan):
            return True
        work = WorkList(plan, self.options)
        if not self.capacity.holds(work):
            return False
        self._upload(plan, work)
        return True

    def follow(self, plan: AttentionPlan) -> bool:
        """Moves on with the plan that was loaded; False, unchanged, where that needs a new list."""
        work = self.work
        if not work.follow(plan):
            return False
        self._staging.put(self._device, self._offsets["kv_lens"][0], work.kv_lens)
        if work.new_blocks is not None:
            first, last = work.new_blocks
            begin = self._offsets["blocks"][0] + first
            self._staging.put(self._device, begin, work.blocks[first:last])
        return True

    def advance_on_device(self) -> None:
        """Adds one token to every row that has any, without the host: one step of decoding.

        The host's list stays behind until the next `follow` or `load`, which brings both together.
        """
        kv_lens = self.part("kv_lens")
        kv_lens += kv_lens > 0

    def _upload(self, plan: AttentionPlan, work: WorkList) -> None:
        """Writes a whole list, in one copy."""
        counts = np.array([len(work.small), len(work.large), len(work.merge_rows)], np.int32)
        parts = {
            name: counts if name == "counts" else getattr(work, name) for name in self._offsets
        }
        size = self._device.shape[0]
        whole = np.zeros(size, dtype=np.int32)
        for name, part in parts.items():
            begin = self._offsets[name][0]
            whole[begin : begin + part.size] = part.reshape(-1)
        self._staging.put(self._device, 0, whole)
        self._plan, self._work = plan, work


class _Staging:
    """Two host buffers in turn, so that one may be written while the other is still being sent."""

    def __init__(self, size: int, *, pinned: bool) -> None:
        self._pinned = pinned
        self._buffers = [torch.empty(size, dtype=torch.int32, pin_memory=pinned) for _ in range(2)]
        self._sent: list[torch.cuda.Event | None] = [None, None]
        self._turn = 0

    def put(self, target: Tensor, begin: int, numbers: Ints) -> None:
        """Sends numbers to target[begin, begin + len(numbers)) in the current stream's order."""
        count = len(numbers)
        self._turn = 1 - self._turn
        sent = self._sent[self._turn]
        if sent is not None:
            sent.synchronize()  # two uploads ago: done, unless the device lags far behind
        source = self._buffers[self._turn][:count]
        source.copy_(torch.from_numpy(numbers))
        target[begin : begin + count].copy_(source, non_blocking=self._pinned)
        if self._pinned:
            self._sent[self._turn] = torch.cuda.current_stream(target.device).record_event()


def _layout(capacity: Capacity) -> tuple[dict[str, tuple[int, int]], int]:
    """Places the parts, each at a multiple of 16 numbers: (name -> [begin, end), total)."""
    sizes = {
        "counts": COUNT_INTS,
        "kv_lens": capacity.rows,
        "small": capacity.small * ITEM_INTS,
        "large": capacity.large * ITEM_INTS,
        "q_rows": capacity.q_rows,
        "blocks": capacity.blocks,
        "merge_rows": capacity.rows,
        "merge_begins": capacity.rows + 16,
        "merge_parts": capacity.partials,
    }
    offsets: dict[str, tuple[int, int]] = {}
    end = 0
    for name, size in sizes.items():
        begin, end = end, end + -(-size // 16) * 16
        offsets[name] = (begin, end)
    return offsets, end
