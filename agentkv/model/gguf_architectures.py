"""How GGUF names and lays out the architectures that can be converted.

A table: what is done with it is `gguf`'s. It reads keys of a file, never a tensor.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from agentkv.model.gguf_metadata import GgufMetadata

GEMMA3_GLOBAL_EVERY = 6
"""Of so many layers of Gemma 3 the last one attends to everything, the others within a window."""
GEMMA3_LARGEST = 62
"""Layers of the one size of Gemma 3 whose scores are not scaled by the size of a head."""

MoreConfig = Callable[[GgufMetadata, Mapping[str, Any]], dict[str, Any]]


def _nothing_more(metadata: GgufMetadata, config: Mapping[str, Any]) -> dict[str, Any]:
    return {}


@dataclass(frozen=True, slots=True)
class Architecture:
    """How one architecture of GGUF is named and laid out in Hugging Face's terms."""

    model_type: str
    model_class: str
    block_tensors: Mapping[str, str]
    """Part of a block in GGUF -> the same part in the model."""
    interleaved: Mapping[str, str] = field(default_factory=dict)
    """Block tensors whose rows llama.cpp reordered for its rotary embedding -> the key that says
    how many heads they have."""
    norms_are_shifted: bool = False
    """The model multiplies by 1 + weight, and the file holds that sum."""
    config: Mapping[str, object] = field(default_factory=dict)
    """Entries of the model's config that the file does not say."""
    more_config: MoreConfig = _nothing_more
    """Makes further entries from the file's keys and the entries so far."""


def _gemma3_config(metadata: GgufMetadata, config: Mapping[str, Any]) -> dict[str, Any]:
    """Says which layers have a window and how the two kinds rotate."""
    num_layers = config["num_hidden_layers"]
    scalar = config["head_dim"]
    if num_layers == GEMMA3_LARGEST:
        scalar = config["hidden_size"] // config["num_attention_heads"]
    return {
        "sliding_window": metadata.require("gemma3.attention.sliding_window", int),
        "layer_types": [
            "sliding_attention" if (layer + 1) % GEMMA3_GLOBAL_EVERY else "full_attention"
            for layer in range(num_layers)
        ],
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": config["rope_theta"]},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
        "query_pre_attn_scalar": scalar,
    }


ARCHITECTURES: Mapping[str, Architecture] = {
    "gemma3": Architecture(
        model_type="gemma3_text",
        model_class="Gemma3ForCausalLM",
        block_tensors={
            "attn_norm": "input_layernorm",
            "attn_q": "self_attn.q_proj",
            "attn_k": "self_attn.k_proj",
            "attn_v": "self_attn.v_proj",
            "attn_q_norm": "self_attn.q_norm",
            "attn_k_norm": "self_attn.k_norm",
            "attn_output": "self_attn.o_proj",
            "post_attention_norm": "post_attention_layernorm",
            "ffn_norm": "pre_feedforward_layernorm",
            "ffn_gate": "mlp.gate_proj",
            "ffn_up": "mlp.up_proj",
            "ffn_down": "mlp.down_proj",
            "post_ffw_norm": "post_feedforward_layernorm",
        },
        norms_are_shifted=True,
        config={"hidden_activation": "gelu_pytorch_tanh", "attention_bias": False},
        more_config=_gemma3_config,
    ),
    "llama": Architecture(
        model_type="llama",
        model_class="LlamaForCausalLM",
        block_tensors={
            "attn_norm": "input_layernorm",
            "attn_q": "self_attn.q_proj",
            "attn_k": "self_attn.k_proj",
            "attn_v": "self_attn.v_proj",
            "attn_output": "self_attn.o_proj",
            "ffn_norm": "post_attention_layernorm",
            "ffn_gate": "mlp.gate_proj",
            "ffn_up": "mlp.up_proj",
            "ffn_down": "mlp.down_proj",
        },
        interleaved={"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"},
        config={"hidden_act": "silu", "attention_bias": False, "mlp_bias": False},
    ),
}
