"""Attention on a CPU by a C kernel: stores a layer's KV and attends, in one call.

Owns what crosses into `_native/attention.c`: addresses, strides, and when that kernel can be used.
What it cannot take, `cpu` computes with torch, with the same result to rounding.

A step's layers differ in little but addresses. So what was checked and laid out for one layer is
kept by the shapes and strides it had, and serves the next layers and the next steps of a plan.
"""

import ctypes
import struct
from typing import NamedTuple

import torch
from torch import Tensor

from agentkv_kernels import checks
from agentkv_kernels.native import NativeLibrary
from agentkv_kernels.native import load_native as find_library
from agentkv_kernels.native_schedule import NativeSchedule, ScheduleOptions
from agentkv_kernels.plan import AttentionPlan
from agentkv_kernels.quantise import KVScales

_ACTIVATIONS = {torch.float32: 0, torch.bfloat16: 1}
_CACHES = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2}
"""The numbers by which `attention.h` calls dtypes."""
_NUMBERS_OF_QUERIES = 12 << 10
"""Numbers of the queries that read together: 48 KB, which a core's caches hold beside a tile."""
_LAYER, _SLOTS = struct.Struct("=11Q23q2d"), struct.Struct("=2q")
"""Layer's fields of `attention.h`, and the range of slots that comes back."""


class Modifiers(NamedTuple):
    """What a layer asks of attention besides its tensors."""

    scale: float
    window: int | None = None
    softcap: float | None = None


class NewKV(NamedTuple):
    """Keys and values to be stored before anything is read."""

    key: Tensor
    """(num_rows, num_kv_heads, head_dim)."""
    value: Tensor
    """(num_rows, num_kv_heads, v_head_dim)."""
    slots: Tensor
    """(num_rows,) int64; -1 skips the row."""


class _Prepared(NamedTuple):
    """What is the same in every layer with the same shapes and strides."""

    schedule: NativeSchedule
    sizes: tuple[float, ...]
    """Layer's fields from the strides on."""
    out_shape: tuple[int, int, int]


class NativeCalls:
    """The calls that one plan's layers make; moves on with the plan."""

    def __init__(self, plan: AttentionPlan, library: NativeLibrary) -> None:
        self._plan = plan
        self._library = library
        self._attend = library.function("attend", *[ctypes.c_void_p] * 3)
        self._prepared: dict[object, _Prepared] = {}
        self._schedules: dict[ScheduleOptions, NativeSchedule] = {}
        self._buffer = ctypes.create_string_buffer(_LAYER.size + _SLOTS.size)
        self.address = ctypes.addressof(self._buffer)
        """Of the layer that was laid out last."""
        end = self.address + _LAYER.size
        self.slot_range = (end, end + 8)
        """Where a kernel writes the lowest and the highest slot."""

    def follow(self, plan: AttentionPlan) -> bool:
        """Cuts the schedules anew for the plan's new lengths."""
        for schedule in self._schedules.values():
            schedule.follow(plan)
        return True

    def attend(
        self,
        query: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        modifiers: Modifiers,
        sinks: Tensor | None,
        scales: KVScales | None,
        new: NewKV | None,
    ) -> Tensor | None:
        """Stores `new`, then attends; arguments as in `ops`. None, untouched, where it cannot.

        Raises:
            ValueError: A shape, size, device or number does not fit.
            TypeError: A dtype does not fit.
        """
        out = self.lay_out(query, k_cache, v_cache, modifiers, sinks, scales, new)
        if out is not None:
            self._attend(self.address, *self.slot_range)
            self.check_slots(k_cache)
        return out

    def lay_out(
        self,
        query: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        modifiers: Modifiers,
        sinks: Tensor | None,
        scales: KVScales | None,
        new: NewKV | None,
    ) -> Tensor | None:
        """Writes a layer at `address`, for a kernel that attends; arguments as in `attend`.

        The range of slots that the kernel found goes to `slot_range`; the tensors must live until
        then.

        Returns:
            Where the kernel writes its result; None where it cannot do this.
        """
        tensors = (query, k_cache, v_cache, sinks, *(scales or ()), *(new or ()))
        signature = (
            modifiers,
            torch.get_num_threads(),
            new is not None,
            scales is not None,
            *[t if t is None else (t.shape, t.stride(), t.dtype, t.is_cpu) for t in tensors],
        )
        prepared = self._prepared.get(signature)
        if prepared is None:
            self._check(query, k_cache, v_cache, modifiers, sinks, scales, new)
            if not _fits(query, k_cache, v_cache, sinks, scales, new):
                return None
            prepared = self._prepare(query, k_cache, v_cache, modifiers, scales, new)
            self._prepared[signature] = prepared
        if prepared.schedule.highest_block >= k_cache.shape[0]:
            self._check_plan(query, k_cache, prepared.schedule.highest_block)
        out = query.new_empty(prepared.out_shape)
        _LAYER.pack_into(
            self._buffer,
            0,
            prepared.schedule.address,
            query.data_ptr(),
            out.data_ptr(),
            *((0, 0, 0) if new is None else [tensor.data_ptr() for tensor in new]),
            k_cache.data_ptr(),
            v_cache.data_ptr(),
            *((0, 0) if scales is None else [factor.data_ptr() for factor in scales]),
            0 if sinks is None else sinks.data_ptr(),
            *prepared.sizes,
        )
        return out

    def check_slots(self, k_cache: Tensor) -> None:
        """Checks the slots that the last call found.

        Raises:
            ValueError: One lies outside the pool; nothing was stored.
        """
        low, high = _SLOTS.unpack_from(self._buffer, _LAYER.size)
        checks.check_slot_range(low, high, k_cache.shape[0] * k_cache.shape[1])

    def _check(
        self,
        query: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        modifiers: Modifiers,
        sinks: Tensor | None,
        scales: KVScales | None,
        new: NewKV | None,
    ) -> None:
        checks.check_query(query, k_cache, v_cache, scales)
        checks.check_modifiers(query, modifiers.window, modifiers.softcap, sinks)
        self._check_plan(query, k_cache, -1)
        if new is not None:
            checks.check_store(*new, k_cache, v_cache, scales)
            checks.check_num_slots(new.slots, self._plan.num_rows)

    def _check_plan(self, query: Tensor, k_cache: Tensor, highest_block: int) -> None:
        checks.check_plan(
            query,
            k_cache,
            num_rows=self._plan.num_rows,
            block_size=self._plan.block_size,
            highest_block=highest_block,
        )

    def _prepare(
        self,
        query: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        modifiers: Modifiers,
        scales: KVScales | None,
        new: NewKV | None,
    ) -> _Prepared:
        """Lays out what follows from shapes and strides, and finds the schedule for it."""
        num_blocks, _, num_kv_heads, head_dim = k_cache.shape
        num_rows, num_q_heads, _ = query.shape
        group, v_head_dim = num_q_heads // num_kv_heads, v_cache.shape[3]
        num_threads = torch.get_num_threads()
        options = ScheduleOptions(
            window=modifiers.window or 0,
            max_queries=max(group, _NUMBERS_OF_QUERIES // max(head_dim, v_head_dim)),
            group=group,
            num_kv_heads=num_kv_heads,
            num_threads=num_threads,
        )
        if options not in self._schedules:
            self._schedules[options] = NativeSchedule(self._plan, options, self._library)
        of_new = (0, 0, 0, 0) if new is None else (*new.key.stride()[:2], *new.value.stride()[:2])
        sizes = (
            *query.stride()[:2],
            *of_new,
            *k_cache.stride()[:3],
            *v_cache.stride()[:3],
            *((0, 0, 0) if scales is None else scales.k.stride()),
            *(num_kv_heads, group, head_dim, v_head_dim, num_blocks),
            *(_ACTIVATIONS[query.dtype], _CACHES[k_cache.dtype], num_threads),
            *(modifiers.scale, modifiers.softcap or 0.0),
        )
        return _Prepared(self._schedules[options], sizes, (num_rows, num_q_heads, v_head_dim))


def calls_of(plan: AttentionPlan) -> NativeCalls | None:
    """Returns what makes a plan's calls, kept with the plan; None without a native library."""
    library = find_library()
    return None if library is None else plan.followed(NativeCalls, library)


def _fits(
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    sinks: Tensor | None,
    scales: KVScales | None,
    new: NewKV | None,
) -> bool:
    """Whether the kernel knows the dtypes and every last dimension is dense."""
    if query.dtype not in _ACTIVATIONS or k_cache.dtype not in _CACHES:
        return False
    dense = [query, k_cache, v_cache, *([] if sinks is None else [sinks]), *(new or ())]
    return (
        all(tensor.is_cpu and tensor.stride(-1) == 1 for tensor in dense)
        and (sinks is None or sinks.dtype == torch.float32)
        and (new is None or (new.key.dtype == query.dtype == new.value.dtype))
        and (scales is None or scales.k.stride() == scales.v.stride())
    )
