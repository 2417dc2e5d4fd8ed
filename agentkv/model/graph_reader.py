"""How layers read inside a graph: from work lists at fixed addresses, refreshed between steps.

One list serves all layers of a kind (heads, head dim, window). Which graphs there are is not known
here, only how many programs each level of one starts.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from agentkv.model.attention import LayerCall
from agentkv.model.graph_sizes import Levels, smallest_level
from agentkv.model.paged_step import AttentionOptions, PlanReader
from agentkv_kernels import (
    AttentionPlan,
    Capacity,
    WorkBuffers,
    WorkOptions,
    store_kv,
    work_list_attention,
    work_options,
)
from agentkv_kernels.int8_layers import LayerCaches
from agentkv_kernels.work_buffers import Buckets


class GraphReader(Protocol):
    """A Reader whose work may be captured."""

    def attend(self, call: LayerCall, kv: LayerCaches, slots: Tensor | None) -> Tensor:
        """Stores a layer's new KV where slots are given, and answers it."""
        ...

    def levels(self, num_rows: int) -> Sequence[Buckets]:
        """Lists the levels that graphs of so many rows are made for."""
        ...

    def aim(self, level: Buckets) -> None:
        """Makes what attends from now on start so many programs."""
        ...

    def load(self, plan: AttentionPlan) -> int | None:
        """Brings the static buffers in step with a plan.

        Returns:
            The level that the plan needs, or None: no graph can run it.
        """
        ...


class WorkListReader:
    """Reads what work lists on the device say; by Triton only."""

    def __init__(
        self,
        options: AttentionOptions,
        levels: Levels,
        capacity: Capacity,
        device: torch.device,
    ) -> None:
        """Makes no lists yet: the layers say, at their first call, which kinds there are.

        Args:
            options: How attention is computed.
            levels: How many programs graphs start.
            capacity: Room of each list.
            device: Where the lists lie.
        """
        self._options = options
        self._levels = levels
        self._capacity = capacity
        self._device = device
        self._lists: dict[WorkOptions, _AimedBuffers] = {}
        self._plan: AttentionPlan | None = None
        self._level: Buckets | None = None

    def attend(self, call: LayerCall, kv: LayerCaches, slots: Tensor | None) -> Tensor:
        """Stores, then answers one layer from its kind's list."""
        if slots is not None:
            store_kv(
                call.key,
                call.value,
                kv.key,
                kv.value,
                slots,
                scales=kv.scales,
                implementation=self._options.implementation,
            )
        options = work_options(
            call.query,
            kv.key,
            kv.value,
            window=call.window,
            batch_invariant=self._options.batch_invariant,
        )
        return work_list_attention(
            call.query,
            kv.key,
            kv.value,
            self._list(options),
            scale=call.scale,
            softcap=call.softcap,
            sinks=call.sinks,
            scales=kv.scales,
        )

    def levels(self, num_rows: int) -> Sequence[Buckets]:
        """Lists those it was made with."""
        return self._levels(num_rows)

    def aim(self, level: Buckets) -> None:
        """Makes every list start as many programs as a level says."""
        self._level = level
        for kept in self._lists.values():
            kept.level = level

    def load(self, plan: AttentionPlan) -> int | None:
        """Uploads what changed of each list."""
        self._plan = plan
        if not all(kept.load(plan) for kept in self._lists.values()):
            return None
        needed = [Buckets.of(kept.work) for kept in self._lists.values()]
        return smallest_level(self._levels(plan.num_rows), needed) if needed else 0

    def _list(self, options: WorkOptions) -> WorkBuffers:
        if options not in self._lists:
            kept = _AimedBuffers(options, self._capacity, self._device)
            kept.level = self._level
            assert self._plan is not None, "nothing was loaded"
            held = kept.load(self._plan)
            assert held, "the first plan has no work"
            self._lists[options] = kept
        return self._lists[options]


class _AimedBuffers(WorkBuffers):
    """A work list whose launches start as many programs as they are told to."""

    level: Buckets | None = None

    @property
    def buckets(self) -> Buckets:
        """The level, where there is one."""
        return self.level or super().buckets


class PlanGraphReader:
    """Reads the plan itself: what stands in on a CPU, where a graph's work runs again as it is."""

    def __init__(self, options: AttentionOptions) -> None:
        self._options = options
        self._reader: PlanReader | None = None

    def attend(self, call: LayerCall, kv: LayerCaches, slots: Tensor | None) -> Tensor:
        """Stores, then answers one layer, as the plan loaded last says."""
        assert self._reader is not None, "nothing was loaded"
        return self._reader.attend(call, kv, slots)

    def levels(self, num_rows: int) -> Sequence[Buckets]:
        """Lists one: no programs are started."""
        return (Buckets(0, 0, 0, 0),)

    def aim(self, level: Buckets) -> None:
        """Does nothing."""

    def load(self, plan: AttentionPlan) -> int | None:
        """Takes any plan."""
        self._reader = PlanReader(self._options, plan)
        return 0
