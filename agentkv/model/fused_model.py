"""A whole model's short way: embedding, all its decoder layers, last norm and head.

Around layers that one native call computes, a model's own forward spends longer on arguments than
on numbers. It is replaced when the model has the parts of Llama's, all its layers are one stretch,
and on random tokens both answer the same logits: names alone say too little. The model's own
forward remains, for passes that do not attend through AgentKV.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from agentkv.errors import UnsupportedModelError
from agentkv.model.angle_table import AngleTable
from agentkv.model.attention import AttentionStep, LayerCall, Witness
from agentkv.model.fused_layer import FusedLayer, agree
from agentkv.model.int8_linear import Int8Linear
from agentkv.model.layer_parts import norm_of
from agentkv_kernels.int8_weights import Norm

_MODEL, _DECODER = {"model", "lm_head"}, {"embed_tokens", "layers", "norm", "rotary_emb"}
_TRIAL_POSITIONS = (0, 5, 1000)


class ShortOutput(NamedTuple):
    """What is read of a model's output."""

    logits: Tensor
    """(1, num_rows, vocab_size)."""


class FusedModel(NamedTuple):
    """The parts of a model whose layers are all taken over."""

    embedding: nn.Module
    angles: AngleTable
    layers: tuple[FusedLayer, ...]
    norm: Norm
    head: Int8Linear

    def forward(
        self, token_ids: Tensor, positions: Tensor, rows: Tensor, step: AttentionStep
    ) -> ShortOutput:
        """Computes the logits of some rows.

        Args:
            token_ids: (1, num_rows) int64.
            positions: The same.
            rows: (n,) int64, those whose logits are wanted.
            step: Attends.
        """
        hidden: Tensor = self.embedding(token_ids)
        angles = self.angles.at(hidden, positions)
        done = 0
        while done < len(self.layers):  # the first call may compute what others would
            hidden, count = self.layers[done].advance(hidden, angles, step)
            done += count
        wanted = hidden if len(rows) == hidden.shape[1] else hidden[:, rows]
        return ShortOutput(self.head.normalised(wanted, self.norm))


def fuse_model(model: nn.Module, fused: Sequence[FusedLayer]) -> bool:
    """Gives a model its short way, if it is understood; answers whether.

    Args:
        model: In evaluation mode, its attention AgentKV's.
        fused: The layers that were taken over, in order.
    """
    short = _parts_of(model, fused)
    if short is None or not _is_the_same(model, short):
        return False
    plain = model.forward

    def forward(
        input_ids: Tensor | None = None,
        *arguments: Any,
        position_ids: Tensor | None = None,
        logits_to_keep: Any = 0,
        agentkv_step: AttentionStep | None = None,
        **options: Any,
    ) -> Any:
        is_ours = agentkv_step is not None and options == {"use_cache": False} and not arguments
        if is_ours and isinstance(input_ids, Tensor) and isinstance(position_ids, Tensor):
            assert agentkv_step is not None and isinstance(logits_to_keep, Tensor)
            return short.forward(input_ids, position_ids, logits_to_keep, agentkv_step)
        if agentkv_step is not None:
            options["agentkv_step"] = agentkv_step
        options.update(position_ids=position_ids, logits_to_keep=logits_to_keep)
        return plain(input_ids, *arguments, **options)

    model.forward = forward
    return True


def _parts_of(model: Any, fused: Sequence[FusedLayer]) -> FusedModel | None:
    """Finds the parts of a model that looks like Llama's, with nothing but layers taken over."""
    if {name for name, _ in model.named_children()} != _MODEL:
        return None
    decoder, head = model.model, model.lm_head
    if {name for name, _ in decoder.named_children()} != _DECODER:
        return None
    norm = norm_of(decoder.norm)
    if norm is None or not isinstance(head, Int8Linear) or not fused:
        return None
    if [layer.module for layer in fused] != list(decoder.layers):
        return None
    table = AngleTable(decoder.rotary_emb)
    return FusedModel(decoder.embed_tokens, table, tuple(fused), norm, head)


def _numbers(call: LayerCall) -> Tensor:
    """Answers numbers of each layer's own, the same in every pass."""
    generator = torch.Generator().manual_seed(call.layer)
    return torch.randn(call.query.shape, generator=generator)


def _is_the_same(model: Any, short: FusedModel) -> bool:
    """Compares the short way with the model's own on a few tokens."""
    positions = torch.tensor([_TRIAL_POSITIONS])
    tokens = torch.tensor([[1, 7, 19]])
    rows = torch.tensor([0, 2])
    own, ours = Witness(_numbers), Witness(_numbers)
    with torch.inference_mode():
        try:
            expected = model(
                input_ids=tokens,
                position_ids=positions,
                use_cache=False,
                logits_to_keep=rows,
                agentkv_step=own,
            ).logits
        except (TypeError, ValueError, UnsupportedModelError):  # it needs something else as well
            return False
        found = short.forward(tokens, positions, rows, ours).logits
    layers, expected_layers = ([call.layer for call in each.calls] for each in (ours, own))
    return layers == expected_layers and agree(found, expected)
