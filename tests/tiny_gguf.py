"""Writes tiny GGUF files as llama.cpp's conversion script would, from a Hugging Face llama.

The layout follows what that script does to a llama: rows of the query and key projections
interleaved per head, the fastest dimension first, norms never quantised.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter
from numpy.typing import NDArray
from tiny_models import build_tiny_model
from tiny_tokenizers import CHATML, CONTROL, MERGES
from tokenizers import pre_tokenizers
from transformers import PreTrainedModel

F32 = GGMLQuantizationType.F32
Q8_0 = GGMLQuantizationType.Q8_0
Q4_1 = GGMLQuantizationType.Q4_1

_PARTS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}

Array = NDArray[Any]


def gguf_tokens() -> list[str]:
    """Lists the vocabulary: control tokens, one token for each byte, merges."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    return [*CONTROL, *alphabet, *(left + right for left, right in MERGES)]


def build_llama(**changes: Any) -> PreTrainedModel:
    """Builds a random llama whose rows can be quantised and whose vocabulary is the tokenizer's."""
    sizes = {"hidden_size": 64, "head_dim": 16, "intermediate_size": 96, "initializer_range": 0.1}
    return build_tiny_model(
        "llama",
        **({"vocab_size": len(gguf_tokens()), "tie_word_embeddings": True} | sizes | changes),
    )


@dataclass
class TinyGguf:
    """What to write; tests change one thing."""

    model: PreTrainedModel
    kind: GGMLQuantizationType = F32
    """How matrices are stored."""
    architecture: str = "llama"
    keys: dict[str, object] = field(default_factory=dict)
    """Keys to add or to replace; None leaves a key out."""
    more_tensors: Mapping[str, Array] = field(default_factory=dict)
    without: str | None = None
    """Name of a tensor to leave out."""

    def write(self, path: Path) -> Path:
        """Writes the file and returns its path."""
        writer = GGUFWriter(path, self.architecture)
        for key, value in (self._keys() | self.keys).items():
            _add(writer, key, value)
        tensors = self.tensors() | dict(self.more_tensors)
        for name, weight in tensors.items():
            if name == self.without:
                continue
            kind = self.kind if weight.ndim == 2 else F32
            writer.add_tensor(name, gguf.quants.quantize(weight, kind), raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    def tensors(self) -> dict[str, Array]:
        """Weights as the file has them; float32, not quantised."""
        return gguf_tensors(self.model)

    def _keys(self) -> dict[str, object]:
        config: Any = self.model.config
        name = self.architecture
        tokens = gguf_tokens()
        return {
            f"{name}.context_length": config.max_position_embeddings,
            f"{name}.block_count": config.num_hidden_layers,
            f"{name}.embedding_length": config.hidden_size,
            f"{name}.feed_forward_length": config.intermediate_size,
            f"{name}.attention.head_count": config.num_attention_heads,
            f"{name}.attention.head_count_kv": config.num_key_value_heads,
            f"{name}.attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
            f"{name}.rope.freq_base": float(config.rope_parameters["rope_theta"]),
            f"{name}.rope.dimension_count": config.head_dim,
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "smollm",
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.token_type": [3] * len(CONTROL) + [1] * (len(tokens) - len(CONTROL)),
            "tokenizer.ggml.merges": [f"{left} {right}" for left, right in MERGES],
            "tokenizer.ggml.bos_token_id": 0,
            "tokenizer.ggml.eos_token_id": 2,
            "tokenizer.ggml.padding_token_id": 2,
            "tokenizer.chat_template": CHATML,
        }


def gguf_tensors(model: PreTrainedModel) -> dict[str, Array]:
    """Names and lays out a llama's weights as llama.cpp does; float32, not quantised."""
    config: Any = model.config
    tensors = {}
    for name, weight in model.state_dict().items():
        array = weight.float().numpy()
        if name == "model.embed_tokens.weight":
            tensors["token_embd.weight"] = array
        elif name == "model.norm.weight":
            tensors["output_norm.weight"] = array
        elif name == "lm_head.weight":
            if not config.tie_word_embeddings:
                tensors["output.weight"] = array
        else:
            _, _, layer, part = name.removesuffix(".weight").split(".", maxsplit=3)
            if part == "self_attn.q_proj":
                array = interleave(array, config.num_attention_heads)
            elif part == "self_attn.k_proj":
                array = interleave(array, config.num_key_value_heads)
            tensors[f"blk.{layer}.{_PARTS[part]}.weight"] = array
    return tensors


def interleave(weight: Array, num_heads: int) -> Array:
    """Puts row i and row i + head_dim / 2 of each head next to each other."""
    heads = np.split(weight, num_heads)
    mixed = []
    for head in heads:
        first, second = np.split(head, 2)
        mixed += [row for pair in zip(first, second, strict=True) for row in pair]
    return np.ascontiguousarray(np.stack(mixed))


def _add(writer: GGUFWriter, key: str, value: object) -> None:
    match value:
        case None:
            pass
        case bool():
            writer.add_bool(key, value)
        case int():
            writer.add_uint32(key, value)
        case float():
            writer.add_float32(key, value)
        case str():
            writer.add_string(key, value)
        case list():
            writer.add_array(key, value)
        case _:
            raise AssertionError(value)
