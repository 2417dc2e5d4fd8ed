"""A plan as the C kernel reads it: cut once per step, used by every layer.

Owns the arrays that `_native/attention_cut.c` reads and the schedule that it makes. How work is cut
is decided there; who sees what, by the plan.
"""

import ctypes
import struct
import weakref
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from agentkv_kernels.native import NativeLibrary
from agentkv_kernels.plan import AttentionPlan

_PLAN = struct.Struct("=8q8Q")
"""Plan's fields of `attention.h`."""


class ScheduleOptions(NamedTuple):
    """What besides the plan decides how work is cut."""

    window: int
    """0: none."""
    max_queries: int
    """Query vectors of one KV head that read together; at least `group`."""
    group: int
    """Query heads of a KV head."""
    num_kv_heads: int
    num_threads: int


class NativeSchedule:
    """The tasks of a plan, as the last `follow` cut them.

    The kernel reads the arrays kept here, by address: they live as long as the schedule, and a
    schedule is used by one thread at a time.
    """

    def __init__(
        self, plan: AttentionPlan, options: ScheduleOptions, library: NativeLibrary
    ) -> None:
        self.highest_block = -1
        """Highest block id that is read; -1 when none is."""
        self._options = options
        self._cut = library.function("cut_schedule", *[ctypes.c_void_p] * 3)
        made = ctypes.c_void_p()
        library.function("new_schedule", ctypes.c_void_p)(ctypes.addressof(made))
        assert made.value is not None
        self.address: int = made.value
        """Of the schedule, for the kernel."""
        free = library.function("free_schedule", ctypes.c_void_p)
        weakref.finalize(self, free, self.address)
        row_counts = [len(rows) for rows in plan.rows]
        self._row_counts = np.asarray(row_counts, np.int64)
        self._row_at = _begins(row_counts)
        self._rows = _joined([np.asarray(rows, np.int32) for rows in plan.rows])
        self._num_known: list[int] = []
        self._block_at = np.empty(0, np.int64)
        self._blocks = np.empty(0, np.int32)
        self.follow(plan)

    def follow(self, plan: AttentionPlan) -> None:
        """Cuts anew for the lengths that a plan of the same topology has now."""
        lengths = np.asarray(plan.kv_lens, np.int32)
        starts, ends = np.asarray(plan.starts, np.int64), np.asarray(plan.ends, np.int64)
        num_known = [len(ids) for ids in plan.blocks]
        if num_known != self._num_known:
            self._num_known = num_known
            self._block_at = _begins(num_known)
            self._blocks = _joined(plan.blocks)
        arrays = (
            *(lengths, starts, ends, self._block_at, self._row_at, self._row_counts),
            *(self._blocks, self._rows),
        )
        fields = _PLAN.pack(
            plan.num_rows,
            plan.num_runs,
            plan.block_size,
            *self._options,
            *[array.__array_interface__["data"][0] for array in arrays],
        )
        highest = ctypes.c_int64()
        self._cut(self.address, fields, ctypes.addressof(highest))
        self.highest_block = highest.value


def _begins(counts: list[int]) -> npt.NDArray[np.int64]:
    """Where each of consecutive lists begins."""
    return np.cumsum([0, *counts[:-1]], dtype=np.int64)


def _joined(parts: list[npt.NDArray[np.int32]]) -> npt.NDArray[np.int32]:
    return np.concatenate(parts) if parts else np.empty(0, np.int32)
