"""Which models are refused by what their config says, before any weight is read.

What cannot be told from a config is left to the golden check, which runs the model.
"""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedConfig

from agentkv.errors import UnsupportedModelError
from agentkv.model.architectures import Refusal

LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})
"""Attention whose mask follows from positions alone; chunked attention lives only in the mask that
the model builds, and linear attention keeps a state instead of KV."""
BATCH_DEPENDENT_ROPE = frozenset({"dynamic", "longrope"})
"""Rotary embeddings whose base depends on the longest position in the batch: cached keys would
disagree with those of the next step."""


class Refused(NamedTuple):
    """Why a whole architecture is refused."""

    why: Refusal
    message: str


def check_supported(config: PreTrainedConfig) -> None:
    """Refuses a model that could not be served exactly.

    Raises:
        UnsupportedModelError: Names what is not supported.
    """
    if (refused := refusal_of(config)) is not None:
        raise UnsupportedModelError(refused.message)
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise UnsupportedModelError(
            f"transformers knows no causal language model of type {config.model_type!r}."
        )
    if dependent := sorted(set(_rope_types(config.get_text_config())) & BATCH_DEPENDENT_ROPE):
        raise UnsupportedModelError(
            f"{_class_name(config)} uses {', '.join(dependent)} rotary embeddings, which depend on "
            "the longest context of the batch; set a static rope type in its config.json."
        )


def refusal_of(config: PreTrainedConfig) -> Refused | None:
    """Says why a config's architecture cannot be served; None where that depends on the rest."""
    if config.is_encoder_decoder:
        return Refused(
            Refusal.ENCODER_DECODER,
            f"{config.model_type!r} is an encoder-decoder model; a decoder-only one is needed.",
        )
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return None
    model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    if not getattr(model_class, "_supports_attention_backend", False):
        return Refused(
            Refusal.OWN_ATTENTION,
            f"{model_class.__name__} does not take a registered attention function, so its KV "
            "cannot be kept in blocks.",
        )
    layer_types = set(getattr(config.get_text_config(), "layer_types", None) or ())
    if unknown := sorted(layer_types - LAYER_TYPES):
        return Refused(
            Refusal.OTHER_LAYERS,
            f"{model_class.__name__} has layers of type {', '.join(unknown)}; only "
            f"{', '.join(sorted(LAYER_TYPES))} can share KV blocks.",
        )
    return None


def _class_name(config: PreTrainedConfig) -> str:
    model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    return str(model_class.__name__)


def _rope_types(text_config: Any) -> Iterator[str]:
    """Lists the rotary embeddings of a config: one for all layers, or one per layer type."""
    parameters = getattr(text_config, "rope_parameters", None) or {}
    for candidate in (parameters, *parameters.values()):
        if isinstance(candidate, Mapping):
            yield str(candidate.get("rope_type", candidate.get("type", "default")))
