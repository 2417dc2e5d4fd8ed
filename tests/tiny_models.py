"""Tiny random Hugging Face models: one builder per family, same weights every time.

Two layers, hidden size 32, a vocabulary of 97: a forward takes a millisecond, and every feature
that changes attention (head ratio, window, softcap, sinks, learned positions) is there. Nothing
is downloaded. Weights are scaled up so that logits differ clearly between tokens.
"""

from collections.abc import Callable
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    Cohere2Config,
    CohereConfig,
    DeepseekV2Config,
    DeepseekV3Config,
    Exaone4Config,
    FalconConfig,
    Gemma2Config,
    Gemma3nTextConfig,
    Gemma3TextConfig,
    Gemma4TextConfig,
    GemmaConfig,
    Glm4Config,
    GPT2Config,
    GPTNeoXConfig,
    GptOssConfig,
    GraniteConfig,
    GraniteMoeConfig,
    Llama4TextConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    Olmo3Config,
    OlmoeConfig,
    OPTConfig,
    Phi3Config,
    PhiConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    SmolLM3Config,
    Starcoder2Config,
)

VOCAB_SIZE = 97
WINDOW = 8
MAX_LENGTH = 256

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": MAX_LENGTH,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def _config(
    config_class: Callable[..., PreTrainedConfig], **changes: Any
) -> Callable[..., PreTrainedConfig]:
    def make(**more: Any) -> PreTrainedConfig:
        fields = _COMMON | changes | more
        return config_class(**{name: value for name, value in fields.items() if value is not None})

    return make


_MIXED = ["sliding_attention", "full_attention"]
FAMILIES: dict[str, Callable[..., PreTrainedConfig]] = {
    "llama": _config(LlamaConfig),
    "qwen2": _config(Qwen2Config),
    "qwen3": _config(Qwen3Config),
    "mistral": _config(MistralConfig, sliding_window=WINDOW),
    "gemma2": _config(
        Gemma2Config,
        sliding_window=WINDOW,
        query_pre_attn_scalar=8,
        attn_logit_softcapping=5.0,
        layer_types=_MIXED,
    ),
    "gemma3": _config(
        Gemma3TextConfig, sliding_window=WINDOW, query_pre_attn_scalar=8, layer_types=_MIXED
    ),
    "gpt2": lambda **more: GPT2Config(
        **(
            {
                "vocab_size": VOCAB_SIZE,
                "n_positions": MAX_LENGTH,
                "n_embd": 32,
                "n_layer": 2,
                "n_head": 4,
                "initializer_range": 0.2,
                "bos_token_id": 1,
                "eos_token_id": 2,
            }
            | more
        )
    ),
    "gpt_oss": _config(
        GptOssConfig,
        sliding_window=WINDOW,
        layer_types=_MIXED,
        num_local_experts=4,
        num_experts_per_tok=2,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
    ),
    "gpt_neox": _config(GPTNeoXConfig),
    "opt": _config(OPTConfig, ffn_dim=64, word_embed_proj_dim=32, init_std=0.2),
    "gemma3n": _config(
        Gemma3nTextConfig,
        num_hidden_layers=4,
        sliding_window=WINDOW,
        num_kv_shared_layers=2,
        layer_types=_MIXED * 2,
        intermediate_size=[64] * 4,
        activation_sparsity_pattern=[0.0] * 4,
        vocab_size_per_layer_input=VOCAB_SIZE,
        hidden_size_per_layer_input=8,
        laurel_rank=4,
        altup_num_inputs=2,
    ),
    "gemma4": _config(
        Gemma4TextConfig,
        num_hidden_layers=4,
        sliding_window=WINDOW,
        num_kv_shared_layers=2,
        layer_types=_MIXED * 2,
        global_head_dim=8,
        vocab_size_per_layer_input=VOCAB_SIZE,
        hidden_size_per_layer_input=8,
    ),
    "gemma4_two_dims": _config(
        Gemma4TextConfig,
        sliding_window=WINDOW,
        num_kv_shared_layers=0,
        layer_types=_MIXED,
        global_head_dim=16,
        vocab_size_per_layer_input=VOCAB_SIZE,
        hidden_size_per_layer_input=8,
    ),
    "deepseek_v3": _config(
        DeepseekV3Config,
        num_key_value_heads=4,
        first_k_dense_replace=2,
        q_lora_rank=8,
        kv_lora_rank=8,
        qk_rope_head_dim=4,
        qk_nope_head_dim=8,
        v_head_dim=8,
        head_dim=None,
    ),
    "deepseek_v2": _config(
        DeepseekV2Config,
        num_key_value_heads=4,
        first_k_dense_replace=1,
        q_lora_rank=8,
        kv_lora_rank=8,
        qk_rope_head_dim=4,
        qk_nope_head_dim=8,
        v_head_dim=8,
        head_dim=None,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        moe_intermediate_size=32,
    ),
    "gemma": _config(GemmaConfig),
    "phi": _config(PhiConfig, head_dim=None, partial_rotary_factor=0.5),
    "phi3": _config(Phi3Config, head_dim=None, sliding_window=WINDOW),
    "olmo2": _config(Olmo2Config, head_dim=None),
    "olmo3": _config(Olmo3Config, head_dim=None, sliding_window=WINDOW, layer_types=_MIXED),
    "olmoe": _config(OlmoeConfig, head_dim=None, num_experts=4, num_experts_per_tok=2),
    "smollm3": _config(SmolLM3Config, head_dim=None, no_rope_layers=[1, 0]),
    "granite": _config(
        GraniteConfig,
        head_dim=None,
        embedding_multiplier=3.0,
        residual_multiplier=0.5,
        attention_multiplier=0.2,
        logits_scaling=2.0,
    ),
    "granitemoe": _config(
        GraniteMoeConfig,
        head_dim=None,
        num_local_experts=4,
        num_experts_per_tok=2,
        attention_multiplier=0.2,
        logits_scaling=2.0,
    ),
    "cohere": _config(CohereConfig, head_dim=None, logit_scale=0.25, use_qk_norm=True),
    "cohere2": _config(Cohere2Config, logit_scale=0.25, sliding_window=WINDOW, layer_types=_MIXED),
    "qwen2_moe": _config(
        Qwen2MoeConfig,
        head_dim=None,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
    ),
    "qwen3_moe": _config(
        Qwen3MoeConfig,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        norm_topk_prob=True,
    ),
    "mixtral": _config(
        MixtralConfig, num_local_experts=4, num_experts_per_tok=2, sliding_window=WINDOW
    ),
    "starcoder2": _config(Starcoder2Config, head_dim=None, sliding_window=WINDOW),
    "glm4": _config(Glm4Config, partial_rotary_factor=0.5),
    "exaone4": _config(Exaone4Config, head_dim=None, sliding_window=WINDOW, layer_types=_MIXED),
    "falcon": _config(FalconConfig, head_dim=None),
    "llama4": _config(
        Llama4TextConfig,
        intermediate_size_mlp=64,
        attention_chunk_size=WINDOW,
        num_local_experts=2,
    ),
}

REFUSED_FAMILIES = frozenset({"falcon", "llama4"})
PROVEN_FAMILIES = tuple(sorted(set(FAMILIES) - REFUSED_FAMILIES))
"""What must come out right on shared blocks."""


def build_tiny_model(
    family: str, *, seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any
) -> PreTrainedModel:
    """Builds the family's model with random weights, ready to run.

    Args:
        family: A name of this module's table, such as `llama` or `gemma3`.
        seed: Of the weights; two calls with one seed give equal models.
        dtype: Of the weights, rounded from the same fp32 ones.
        changes: Fields of the configuration to set otherwise.
    """
    factory: Any = AutoModelForCausalLM  # the library does not type its methods
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model: Any = factory.from_config(FAMILIES[family](**changes))
        for name, weight in model.named_parameters():
            if name.endswith("sinks"):  # left uninitialised by the library
                torch.nn.init.normal_(weight)
    built: PreTrainedModel = model.to(dtype).eval()
    return built
