"""A GGUF file of Gemma 3 gives its model back: shifted norms, windows, SentencePiece's tokens."""

import random
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from tiny_gguf import Array, TinyGguf
from tiny_models import WINDOW, build_tiny_model
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from agentkv.model.gguf import convert_gguf

CONTROL = ["<pad>", "<eos>", "<bos>", "<unk>"]
USER = ["\n\n", "  ", "<b>"]
LETTERS = ["▁", *"abcdehlorw"]
JOINED = ["he", "ll", "hell", "lo", "hello", "▁w", "or", "▁wor", "ld", "▁world", "el", "ab", "bc"]
PARTS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "post_feedforward_layernorm": "post_ffw_norm",
}


def vocabulary() -> list[str]:
    return [*CONTROL, *USER, *(f"<0x{byte:02X}>" for byte in range(256)), *JOINED, *LETTERS]


class TinyGemma3(TinyGguf):
    """What llama.cpp's script writes of a Gemma 3."""

    def tensors(self) -> dict[str, Array]:
        tensors = {}
        for name, weight in self.model.state_dict().items():
            array = weight.float().numpy()
            array = array + 1 if name.endswith("norm.weight") else array
            if name == "model.embed_tokens.weight":
                tensors["token_embd.weight"] = array
            elif name == "model.norm.weight":
                tensors["output_norm.weight"] = array
            elif name != "lm_head.weight":
                _, _, layer, part = name.removesuffix(".weight").split(".", maxsplit=3)
                tensors[f"blk.{layer}.{PARTS[part]}.weight"] = array
        return tensors

    def _keys(self) -> dict[str, object]:
        config: Any = self.model.config
        tokens, num_special = vocabulary(), len(CONTROL) + len(USER)
        num_joined = len(tokens) - num_special - 256
        return {
            "gemma3.context_length": config.max_position_embeddings,
            "gemma3.block_count": config.num_hidden_layers,
            "gemma3.embedding_length": config.hidden_size,
            "gemma3.feed_forward_length": config.intermediate_size,
            "gemma3.attention.head_count": config.num_attention_heads,
            "gemma3.attention.head_count_kv": config.num_key_value_heads,
            "gemma3.attention.key_length": config.head_dim,
            "gemma3.attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
            "gemma3.attention.sliding_window": config.sliding_window,
            "gemma3.rope.freq_base": 1e6,
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.scores": [
                *([-1000.0] * num_special),
                *([0.0] * 256),
                *(-float(rank) for rank in range(num_joined)),
            ],
            "tokenizer.ggml.token_type": [
                *([3] * len(CONTROL)),
                *([4] * len(USER)),
                *([6] * 256),
                *([1] * num_joined),
            ],
            "tokenizer.ggml.bos_token_id": 2,
            "tokenizer.ggml.eos_token_id": 1,
            "tokenizer.ggml.unknown_token_id": 3,
            "tokenizer.ggml.padding_token_id": 0,
            "tokenizer.ggml.add_bos_token": True,
            "tokenizer.ggml.add_space_prefix": False,
        }


def build_gemma3() -> Any:
    """Seven layers, so that one attends to everything between others that do not."""
    kinds = [*(["sliding_attention"] * 5), "full_attention", "sliding_attention"]
    model: Any = build_tiny_model(
        "gemma3",
        num_hidden_layers=7,
        layer_types=kinds,
        vocab_size=len(vocabulary()),
        tie_word_embeddings=True,
    )
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("norm.weight"):
                weight.normal_(std=0.2)
    return model


def convert(folder: Path, model: Any) -> Path:
    path = TinyGemma3(model, architecture="gemma3").write(folder / "tiny.gguf")
    return convert_gguf(path, cache_root=folder / "cache", report=lambda _: None)


def test_a_file_of_gemma3_gives_the_model_back(tmp_path: Path) -> None:
    """Catches norms that are off by one, a window at the wrong layers, a lost rotary base."""
    model = build_gemma3()
    factory: Any = AutoModelForCausalLM
    loaded = factory.from_pretrained(convert(tmp_path, model), dtype=torch.float32).eval()
    ids = torch.arange(3 * WINDOW)[None] + 7
    with torch.inference_mode():
        torch.testing.assert_close(loaded(ids).logits, model(ids).logits, rtol=0, atol=2e-5)
    assert loaded.config.layer_types == model.config.layer_types


def test_text_is_split_as_sentencepiece_splits_it(tmp_path: Path) -> None:
    """Catches merges in another order than the scores', lost bytes, and a space too many."""
    folder = convert(tmp_path, build_gemma3())
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    dice = random.Random(3)
    texts = ["hello world", "helloé world", *("".join(dice.choices("abcdehlorw ", k=30)))]
    for text in [*texts, *("".join(dice.choices("abhelorwd", k=25)) for _ in range(40))]:
        ids = tokenizer(text).input_ids
        assert ids[0] == 2, "the tokenizer begins a text with BOS"
        assert tokenizer.convert_ids_to_tokens(ids[1:]) == sentencepiece(text.replace(" ", "▁"))
        assert tokenizer.decode(ids[1:]) == text
    marked = tokenizer("a\n\nb  <b>", add_special_tokens=False).input_ids
    assert tokenizer.convert_ids_to_tokens(marked) == ["a", "\n\n", "b", "  ", "<b>"]
    assert tokenizer.decode(marked) == "a\n\nb  <b>"


def sentencepiece(text: str) -> Sequence[str]:
    """The rule itself: join the best pair of neighbours, the leftmost of equals, until none."""
    scores = {token: -rank for rank, token in enumerate([*JOINED, *LETTERS])}
    pieces = list(text)
    while True:
        pairs = [(left + right) for left, right in pairwise(pieces)]
        known = [(scores[pair], -place) for place, pair in enumerate(pairs) if pair in scores]
        if not known:
            return [part for piece in pieces for part in in_bytes(piece, scores)]
        place = -max(known)[1]
        pieces[place : place + 2] = [pieces[place] + pieces[place + 1]]


def in_bytes(piece: str, scores: dict[str, int]) -> list[str]:
    """What has no token of its own becomes bytes."""
    return [piece] if piece in scores else [f"<0x{byte:02X}>" for byte in piece.encode()]
