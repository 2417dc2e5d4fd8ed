"""Decoder layers with 8-bit weights, computed by native calls instead of some forty of torch each.

A layer is taken over when it has the parts of Llama's, and when, on random rows, it then gives
attention the same queries, keys and values and answers the same as the layer did: names alone say
too little. Others stay as they are. Layers that follow each other and ask the same of attention
are one call, where the step allows that. A layer's own forward remains, for passes that do not
attend through AgentKV, so that the golden check compares the two.
"""

from collections.abc import Sequence
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from agentkv.errors import UnsupportedModelError
from agentkv.model.attention import AttentionStep, LayerCall, Witness
from agentkv.model.layer_parts import parts_of
from agentkv.model.paged_step import PagedStep
from agentkv_kernels.cpu_native import Modifiers
from agentkv_kernels.int8_layers import Angles, Int8Layers, LayerParts, LayerRun
from agentkv_kernels.int8_weights import Int8Products

TOLERANCE = 1e-3
"""Relative difference, in the norm, of what a layer hands out. More than float32's: where a value
lies between two integers, its last bit decides which one it becomes."""
_TENSORS = ("query", "key", "value")


def fuse_layers(model: nn.Module, products: Int8Products) -> list["FusedLayer"]:
    """Gives every layer that is understood its short way; answers those, in order.

    Args:
        model: In evaluation mode, with 8-bit weights, its attention AgentKV's.
        products: As its layers have; without native kernels nothing is done.
    """
    if products.native is None:
        return []
    kernels = Int8Layers(products)
    fused: list[FusedLayer] = []
    for layer in list(model.modules()):
        parts = parts_of(layer)
        if parts is not None and (taken := _take_over(layer, parts, kernels)) is not None:
            fused.append(taken)
    _join(fused, kernels)
    return fused


class FusedLayer:
    """One layer's short way."""

    def __init__(
        self, module: nn.Module, parts: LayerParts, call: LayerCall, kernels: Int8Layers
    ) -> None:
        """Takes a layer, its parts, and what it asks of attention, whatever the tensors."""
        self.module = module
        self.parts = parts
        self.call = call
        self.stretch: Stretch | None = None
        """The layers it is computed with."""
        self._kernels = kernels

    def forward(self, hidden: Tensor, angles: Angles, step: AttentionStep) -> Tensor:
        """Computes the layer; the first of a stretch may compute all of it.

        Args:
            hidden: (1, num_rows, hidden_size) float32, dense; not changed.
            angles: Of the rotary embedding.
            step: Attends.

        Returns:
            (1, num_rows, hidden_size).
        """
        if isinstance(step, PagedStep) and self.stretch and self.call.layer in step.layers:
            return hidden  # computed with the first one's call
        return self.advance(hidden, angles, step)[0]

    def advance(self, hidden: Tensor, angles: Angles, step: AttentionStep) -> tuple[Tensor, int]:
        """Computes the layer, or the whole stretch that it is the first of.

        Args:
            hidden: As of `forward`.
            angles: Of the rotary embedding.
            step: Attends.

        Returns:
            The same as `forward`, and the number of layers that this was.
        """
        stretch = self.stretch
        if isinstance(step, PagedStep) and stretch is not None and stretch.layers[0] is self:
            out = stretch.forward(hidden, angles, step)
            if out is not None:
                return out, len(stretch.layers)
        query, key, value = self._kernels.before(self.parts, hidden, angles)
        attended = step.attend(self.call._replace(query=query, key=key, value=value))
        return self._kernels.after(self.parts, hidden.clone(), attended.contiguous()), 1


class Stretch:
    """Layers that follow each other and ask the same of attention."""

    def __init__(self, layers: Sequence[FusedLayer], kernels: Int8Layers) -> None:
        """Takes the layers, in order."""
        self.layers = tuple(layers)
        self._kernels = kernels
        self._indices = tuple(layer.call.layer for layer in layers)
        self._run: LayerRun | None = None

    def forward(self, hidden: Tensor, angles: Angles, step: PagedStep) -> Tensor | None:
        """Computes all layers; arguments as of one. None where they must be computed one by one."""
        view = step.native_view(self._indices)
        if view is None:
            return None
        if self._run is None or self._run.caches is not view.caches:
            call = self.layers[0].call
            modifiers = Modifiers(call.scale, call.window, call.softcap)
            parts = [layer.parts for layer in self.layers]
            self._run = LayerRun(parts, view.caches, modifiers)
        step.before_waiting()
        out = self._kernels.run(self._run, hidden, angles, view.slots, view.plan)
        if out is not None:
            step.layers.extend(self._indices)
        return out


def _join(fused: Sequence[FusedLayer], kernels: Int8Layers) -> None:
    """Finds the stretches."""

    def alike(item: tuple[int, FusedLayer]) -> tuple[object, ...]:
        place, layer = item
        call, parts = layer.call, layer.parts
        sizes = (parts.head_dim, parts.num_heads, parts.num_kv_heads, parts.down.num_inputs)
        # Indices that follow each other are as far from the places in this list.
        return call.layer - place, call.scale, call.window, call.softcap, call.sinks is None, sizes

    for key, members in groupby(enumerate(fused), key=alike):
        layers = [layer for _, layer in members]
        has_no_sinks = key[4]
        if has_no_sinks and len(layers) > 1:
            stretch = Stretch(layers, kernels)
            for layer in layers:
                layer.stretch = stretch


def _take_over(layer: Any, parts: LayerParts, kernels: Int8Layers) -> FusedLayer | None:
    """Compares the short way with a layer's own on a few rows; the layer takes it if they agree."""
    plain = layer.forward
    trial = _Trial.of(parts)
    own, ours = Witness(lambda _: trial.attended), Witness(lambda _: trial.attended)
    try:
        expected = plain(
            trial.hidden,
            attention_mask=None,
            position_embeddings=tuple(trial.angles),
            agentkv_step=own,
        )
    except (TypeError, ValueError, UnsupportedModelError):  # it needs something else as well
        return None
    if len(own.calls) != 1 or not isinstance(expected, Tensor):
        return None
    fused = FusedLayer(layer, parts, own.calls[0], kernels)
    pairs = [(fused.forward(trial.hidden, trial.angles, ours), expected)]
    pairs += [(getattr(ours.calls[0], name), getattr(fused.call, name)) for name in _TENSORS]
    if not all(agree(*pair) for pair in pairs):
        return None

    def forward(
        hidden_states: Tensor,
        *arguments: Any,
        agentkv_step: AttentionStep | None = None,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        **options: Any,
    ) -> Tensor:
        if agentkv_step is not None and position_embeddings is not None and not arguments:
            return fused.forward(hidden_states, Angles(*position_embeddings), agentkv_step)
        if agentkv_step is not None:
            options["agentkv_step"] = agentkv_step
        answer: Tensor = plain(
            hidden_states, *arguments, position_embeddings=position_embeddings, **options
        )
        return answer

    layer.forward = forward
    return fused


class _Trial(NamedTuple):
    """Rows on which a layer is tried."""

    hidden: Tensor
    angles: Angles
    attended: Tensor

    @classmethod
    def of(cls, parts: LayerParts) -> "_Trial":
        generator = torch.Generator().manual_seed(0)
        num_rows, half = 3, parts.head_dim // 2
        angles = torch.rand((1, num_rows, half), generator=generator) * 6
        angles = torch.cat((angles, angles), dim=-1)
        attended = torch.randn((num_rows, parts.num_heads, parts.head_dim), generator=generator)
        hidden = torch.randn((1, num_rows, parts.inputs.num_inputs), generator=generator)
        return cls(hidden, Angles(angles.cos(), angles.sin()), attended)


def agree(found: Tensor, expected: Tensor) -> bool:
    """Whether two ways compute the same, but for a last bit here and there."""
    if found.shape != expected.shape:
        return False
    return bool((found - expected).norm() <= TOLERANCE * expected.norm())
