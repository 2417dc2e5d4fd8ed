"""One forward pass as attention sees it: store this step's KV, then read what the plan says.

A step is one object for as long as its runner lives, and is told before each pass what to read and
where to write: a compiled model must not meet a new object at every step. How a layer reads is up
to a Reader. This file knows no rows of logits and no sampling.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from agentkv.model.attention import LayerCall
from agentkv.model.kv_cache import KVCache
from agentkv.model.step_rows import StepRows
from agentkv_kernels import AttentionPlan, store_and_attend, tree_attention
from agentkv_kernels.int8_layers import LayerCaches
from agentkv_kernels.ops import Implementation


def nothing() -> None:
    """Has nothing to do meanwhile."""


class NativeView(NamedTuple):
    """What a kernel needs that computes whole layers, their attention included."""

    caches: tuple[LayerCaches, ...]
    """Of each layer; the same tuple in every pass over the same pool."""
    slots: Tensor | None
    """Where the rows' KV goes, (num_rows,) int64; None: nowhere."""
    plan: AttentionPlan


class Reader(Protocol):
    """Stores a layer's new KV, then attends."""

    def attend(self, call: LayerCall, kv: LayerCaches, slots: Tensor | None) -> Tensor:
        """Answers one layer.

        Args:
            call: What the layer asks.
            kv: What it reads.
            slots: Where its new K and V go, (num_rows,) int64; None: another layer's serve it.

        Returns:
            (num_rows, num_query_heads, head_dim).
        """
        ...


class AttentionOptions(NamedTuple):
    """How attention is computed, whatever the step."""

    implementation: Implementation | None = None
    """Of the kernels; None takes the one for the device."""
    batch_invariant: bool = False
    """A row's bits do not depend on the other rows."""


class PlanReader:
    """Reads what an AttentionPlan says."""

    def __init__(self, options: AttentionOptions, plan: AttentionPlan) -> None:
        self._options = options
        self.plan = plan
        """The plan, which whoever computes on a CPU may read by itself if `is_plain`."""
        self.is_plain = options.implementation in (None, "cpu") and not options.batch_invariant

    def attend(self, call: LayerCall, kv: LayerCaches, slots: Tensor | None) -> Tensor:
        """Answers one layer, as the plan is now."""
        implementation, batch_invariant = self._options
        if slots is None:
            return tree_attention(
                call.query,
                kv.key,
                kv.value,
                self.plan,
                scale=call.scale,
                window=call.window,
                softcap=call.softcap,
                sinks=call.sinks,
                scales=kv.scales,
                batch_invariant=batch_invariant,
                implementation=implementation,
            )
        return store_and_attend(
            call.query,
            call.key,
            call.value,
            kv.key,
            kv.value,
            slots,
            self.plan,
            scale=call.scale,
            window=call.window,
            softcap=call.softcap,
            sinks=call.sinks,
            scales=kv.scales,
            batch_invariant=batch_invariant,
            implementation=implementation,
        )


class PagedStep:
    """Answers the layers' calls of one forward pass after the other."""

    def __init__(self, kv: KVCache, options: AttentionOptions) -> None:
        self.layers: list[int] = []
        """Layers that called since `begin`."""
        self._kv = kv
        self._options = options
        self._rows: StepRows | None = None
        self._reader: Reader | None = None
        self._meanwhile: Callable[[], None] = nothing
        self._caches: dict[tuple[int, ...], tuple[LayerCaches, ...] | None] = {}

    def begin(
        self, rows: StepRows, reader: Reader, meanwhile: Callable[[], None] = nothing
    ) -> None:
        """Tells what the next pass computes, and what may be done while it does."""
        self.layers.clear()
        self._rows, self._reader, self._meanwhile = rows, reader, meanwhile

    def before_waiting(self) -> None:
        """Does what may be done meanwhile, once a pass: this thread is about to wait for long."""
        meanwhile, self._meanwhile = self._meanwhile, nothing
        meanwhile()

    def attend(self, call: LayerCall) -> Tensor:
        """Stores the layer's new K and V unless another layer's serve it, then attends."""
        assert self._rows is not None, "no pass has begun"
        assert self._reader is not None
        self.layers.append(call.layer)
        key, value = self._kv.layer(call.layer)
        kv = LayerCaches(key, value, self._kv.scales(call.layer))
        writes = self._rows.is_writing and self._kv.owns_kv(call.layer)
        return self._reader.attend(call, kv, self._rows.slots if writes else None)

    def native_view(self, layers: Sequence[int]) -> NativeView | None:
        """Returns what a native kernel needs to compute some layers; None where `attend` must."""
        assert self._rows is not None, "no pass has begun"
        reader = self._reader
        if not isinstance(reader, PlanReader) or not reader.is_plain:
            return None
        caches = self._native_caches(tuple(layers))
        if caches is None:
            return None
        return NativeView(caches, self._rows.slots if self._rows.is_writing else None, reader.plan)

    def _native_caches(self, layers: tuple[int, ...]) -> tuple[LayerCaches, ...] | None:
        """Finds where some layers' KV lies, once; None unless a native kernel may write it."""
        if layers not in self._caches:
            kv = self._kv
            is_native = kv.shape.device.type == "cpu" and all(map(kv.owns_kv, layers))
            found = (LayerCaches(*kv.layer(layer), kv.scales(layer)) for layer in layers)
            self._caches[layers] = tuple(found) if is_native else None
        return self._caches[layers]
