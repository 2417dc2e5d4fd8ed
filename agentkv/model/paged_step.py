"""One forward pass as attention sees it: store this step's KV, then read what the plan says.

A step is one object for as long as its runner lives, and is told before each pass what to read and
where to write: a compiled model must not meet a new object at every step. How a layer reads is up
to a Reader. This file knows no rows of logits and no sampling.
"""

from typing import NamedTuple, Protocol

from torch import Tensor

from agentkv.model.attention import LayerCall
from agentkv.model.kv_cache import KVCache
from agentkv.model.step_rows import StepRows
from agentkv_kernels import AttentionPlan, KVScales, store_and_attend, tree_attention
from agentkv_kernels.ops import Implementation


class LayerKV(NamedTuple):
    """What one layer reads."""

    key: Tensor
    """(num_blocks, block_size, num_kv_heads, head_dim)."""
    value: Tensor
    """The same."""
    scales: KVScales | None
    """Factors of an 8-bit pool."""


class Reader(Protocol):
    """Stores a layer's new KV, then attends."""

    def attend(self, call: LayerCall, kv: LayerKV, slots: Tensor | None) -> Tensor:
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
        self._plan = plan

    def attend(self, call: LayerCall, kv: LayerKV, slots: Tensor | None) -> Tensor:
        """Answers one layer, as the plan is now."""
        implementation, batch_invariant = self._options
        if slots is None:
            return tree_attention(
                call.query,
                kv.key,
                kv.value,
                self._plan,
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
            self._plan,
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

    def begin(self, rows: StepRows, reader: Reader) -> None:
        """Tells what the next pass computes."""
        self.layers.clear()
        self._rows, self._reader = rows, reader

    def attend(self, call: LayerCall) -> Tensor:
        """Stores the layer's new K and V unless another layer's serve it, then attends."""
        assert self._rows is not None, "no pass has begun"
        assert self._reader is not None
        self.layers.append(call.layer)
        key, value = self._kv.layer(call.layer)
        kv = LayerKV(key, value, self._kv.scales(call.layer))
        writes = self._rows.is_writing and self._kv.owns_kv(call.layer)
        return self._reader.attend(call, kv, self._rows.slots if writes else None)
