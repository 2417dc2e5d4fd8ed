"""The attention function that Hugging Face models call instead of their own.

Transformers looks it up under the name `agentkv` and hands over one layer's queries, keys and
values. Everything else that attention needs (where KV lies, who reads what) travels in one keyword
argument, so there is no global and the models stay unchanged. Cache classes are not touched: that
is what makes the hook independent of the library's version.

This file knows no pool and no plan: what a layer's call does is up to the step object. It refuses,
by name, every argument it does not understand: an ignored one would be a silently wrong model.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from agentkv.errors import UnsupportedModelError

ATTENTION_NAME = "agentkv"
"""Name of the function in transformers' registry. No mask is registered under it: none is built."""
UNTRACED_NAME = "agentkv_untraced"
"""Name of the same function for compiled models, which call it without looking inside."""

_WITHOUT_EFFECT = frozenset(
    {
        "cache_position",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "position_ids",
        "use_cache",
    }
)
"""Arguments that models pass along and that change nothing about attention itself."""


class LayerCall(NamedTuple):
    """What one layer asks of attention, for the rows of one step."""

    layer: int
    query: Tensor
    """(num_rows, num_query_heads, head_dim)"""
    key: Tensor
    """(num_rows, num_kv_heads, head_dim), of the step's own tokens."""
    value: Tensor
    """(num_rows, num_kv_heads, head_dim), narrower values filled up with zeros."""
    scale: float
    """Factor of the scores: it differs per model, so it is always the model's own."""
    window: int | None
    """Positions a row reads, itself included; None reads all."""
    softcap: float | None
    """Scores become softcap * tanh(score / softcap)."""
    sinks: Tensor | None
    """(num_query_heads,): logits that take part in the softmax and carry no value."""


class AttentionStep(Protocol):
    """One forward pass as attention sees it."""

    def attend(self, call: LayerCall) -> Tensor:
        """Answers one layer: (num_rows, num_query_heads, head_dim)."""
        ...


class Witness:
    """Attention that writes down what it is asked, and answers what it is told to.

    The calls keep their tensors alive, so two layers that hand over the same storage share KV.
    """

    def __init__(self, answer: Callable[[LayerCall], Tensor]) -> None:
        self.calls: list[LayerCall] = []
        """In the order of the layers' calls."""
        self._answer = answer

    def attend(self, call: LayerCall) -> Tensor:
        """Answers one layer."""
        self.calls.append(call)
        return self._answer(call)


def _attention(
    module: nn.Module,
    query: Tensor,  # (1, num_query_heads, num_rows, head_dim)
    key: Tensor,  # (1, num_kv_heads, num_rows, head_dim)
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    agentkv_step: AttentionStep,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **others: object,
) -> tuple[Tensor, None]:
    """Stores and attends for one layer; the signature is that of transformers' interface."""
    _refuse_unknown(module, attention_mask, dropout, others)
    call = LayerCall(
        layer=_layer_of(module),
        query=query[0].transpose(0, 1),
        key=key[0].transpose(0, 1),
        value=_as_wide_as(key, value)[0].transpose(0, 1),
        scale=query.shape[-1] ** -0.5 if scaling is None else float(scaling),
        window=sliding_window,
        softcap=softcap,
        sinks=s_aux,
    )
    attended = agentkv_step.attend(call)[..., : value.shape[-1]]
    return attended[None], None  # (1, num_rows, num_query_heads, value_dim)


def _as_wide_as(key: Tensor, value: Tensor) -> Tensor:
    """Fills values up with zeros to the width of the keys: those of latent attention are narrower.

    A sum of values is then filled up as well, so nothing but memory is lost.
    """
    missing = key.shape[-1] - value.shape[-1]
    return nn.functional.pad(value, (0, missing)) if missing > 0 else value


def _layer_of(module: nn.Module) -> int:
    layer = getattr(module, "layer_idx", None)
    if not isinstance(layer, int):
        raise UnsupportedModelError(
            f"{type(module).__name__} does not say which layer it is (no layer_idx), so its KV has "
            "no place. Use a model whose attention follows transformers' attention interface."
        )
    return layer


def _refuse_unknown(
    module: nn.Module, mask: Tensor | None, dropout: float, others: dict[str, object]
) -> None:
    """Raises when the layer asks for something that would be left out of the result.

    Raises:
        UnsupportedModelError: Names every such argument.
    """
    unknown = {
        name for name, given in others.items() if given is not None and name not in _WITHOUT_EFFECT
    }
    if mask is not None:
        unknown.add("attention_mask")
    if dropout:
        unknown.add("dropout")
    if getattr(module, "is_causal", True) is False:
        unknown.add("is_causal=False")
    if unknown:
        raise UnsupportedModelError(
            f"{type(module).__name__} passes attention arguments that are not understood: "
            f"{', '.join(sorted(unknown))}. The model cannot be served exactly."
        )


def use_agentkv_attention(model: PreTrainedModel, *, is_traced: bool = True) -> None:
    """Makes every layer of the model call this file's function from now on.

    Args:
        model: Any.
        is_traced: False for a model that torch.compile compiles: it then leaves attention alone.

    Raises:
        UnsupportedModelError: The model computes attention without transformers' interface.
    """
    name, function = ATTENTION_NAME, _attention
    if not is_traced:  # made only now: it loads the whole compiler
        compiler: Any = torch.compiler  # its functions carry no types
        name, function = UNTRACED_NAME, compiler.disable(_attention)
    AttentionInterface.register(name, function)
    if not getattr(type(model), "_supports_attention_backend", False):
        raise UnsupportedModelError(
            f"{type(model).__name__} computes attention by itself instead of through transformers' "
            "attention interface, so its KV cannot be shared. Use another model family."
        )
    model.set_attn_implementation(name)


def check_called_once(model: PreTrainedModel, layers: Sequence[int], num_layers: int) -> None:
    """Checks that a forward pass called attention exactly once per layer.

    Raises:
        UnsupportedModelError: Some layer did not call, called twice, or does not exist.
    """
    if sorted(layers) != list(range(num_layers)):
        raise UnsupportedModelError(
            f"{type(model).__name__} has {num_layers} layers but called attention for layers "
            f"{list(layers)}: each must call exactly once. Some layers work in another way, "
            "which is not supported."
        )


def forward(
    model: PreTrainedModel,
    step: AttentionStep,
    token_ids: Tensor,
    positions: Tensor,
    rows: Tensor,
) -> Tensor:
    """Runs the model on packed rows.

    Args:
        model: One that `use_agentkv_attention` has prepared.
        step: Answers the layers' calls.
        token_ids: (num_rows,) int64.
        positions: (num_rows,) int64. Given always: the models' default counts up from 0, which is
            wrong for packed branches.
        rows: (n,) int64: the rows whose logits are wanted.

    Returns:
        Logits of those rows, (n, vocab_size), in the model's dtype.
    """
    output = model(
        input_ids=token_ids[None],
        position_ids=positions[None],
        use_cache=False,
        logits_to_keep=rows,
        agentkv_step=step,
    )
    logits = output.logits
    assert isinstance(logits, torch.Tensor)
    return logits[0]
