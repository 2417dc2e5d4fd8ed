"""Which architectures were proven on shared blocks, and which are refused, by name.

Names are those that a model's config.json gives as `model_type`. The tests run every proven one and
ask transformers' registry about every refused one, so neither list can say what is no longer true.
What is in no list is tried by the golden check when it is loaded. It knows no model.
"""

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType


class Refusal(StrEnum):
    """Why no model of an architecture can be served exactly."""

    ENCODER_DECODER = "an encoder reads its prompt, not a decoder alone"
    OWN_ATTENTION = "it computes attention by itself, or keeps a state instead of KV"
    OTHER_LAYERS = "some of its layers are neither full nor sliding-window attention"


PROVEN: tuple[str, ...] = (
    *("cohere", "cohere2", "deepseek_v2", "deepseek_v3", "exaone4", "gemma", "gemma2"),
    *("gemma3_text", "gemma3n_text", "gemma4_text", "glm4", "gpt2", "gpt_neox", "gpt_oss"),
    *("granite", "granitemoe", "llama", "mistral", "mixtral", "olmo2", "olmo3", "olmoe"),
    *("opt", "phi", "phi3", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "smollm3", "starcoder2"),
)
"""Compared with transformers, branch by branch, at every change of this code."""

REFUSED: Mapping[Refusal, tuple[str, ...]] = MappingProxyType(
    {
        Refusal.ENCODER_DECODER: (
            *("bart", "bigbird_pegasus", "blenderbot", "blenderbot-small", "marian", "mbart"),
            *("musicgen", "musicgen_melody", "mvp", "pegasus", "plbart", "prophetnet", "whisper"),
        ),
        Refusal.OWN_ATTENTION: (
            *("bailing_hybrid", "bamba", "big_bird", "biogpt", "bloom", "blt", "cpmant", "falcon"),
            *("falcon_h1", "falcon_mamba", "git", "gpt_neo", "gpt_neox_japanese"),
            *("inkling2_loop_text", "inkling2_text", "inkling_text", "jamba", "kimi_linear"),
            *("lara_mini", "mamba", "mamba2", "megatron-bert", "mpt", "nemotron_h", "olmo_hybrid"),
            *("openai-gpt", "qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_5_text"),
            *("qwen3_next", "qwen4_exp", "qwen4_exp_text", "reformer", "rembert", "roformer"),
            *("rwkv", "stablelm", "trocr", "xglm", "xlm", "xlnet", "xlstm", "zamba", "zamba2"),
        ),
        Refusal.OTHER_LAYERS: (
            *("axk2", "deepseek_v32", "deepseek_v4", "dots3_note", "dots3_note_text"),
            *("glm_moe_dsa", "granitemoehybrid", "hy_v4", "lfm3", "llama4", "llama4_text"),
            *("minimax", "recurrent_gemma", "zaya"),
        ),
    }
)
"""What transformers knows as causal language models and the loader refuses."""
