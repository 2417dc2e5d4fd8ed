"""Writes the tokenizer of a GGUF file as `tokenizer.json` and `tokenizer_config.json`.

It owns how text is split and which tokens are control tokens; it knows no weights. Byte-level BPE,
which GGUF calls the model `gpt2`, is made here, SentencePiece's (`llama`) in `gguf_sentencepiece`.
Another way of splitting text for the former is another entry of `PRE_TOKENIZERS`, under the name
that llama.cpp gives it.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from tokenizers.pre_tokenizers import PreTokenizer

from agentkv.errors import UnsupportedModelError
from agentkv.model.gguf_metadata import GgufMetadata
from agentkv.model.gguf_sentencepiece import build_sentencepiece


class TokenType(IntEnum):
    """Kinds of token in GGUF."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True, slots=True)
class ControlTokens:
    """Ids of the tokens that a model's own configuration names."""

    bos: int | None
    eos: tuple[int, ...]
    pad: int | None

    def config_entries(self) -> dict[str, object]:
        """Entries of `config.json` and `generation_config.json`; what is unknown is left out."""
        entries: dict[str, object] = {}
        if self.bos is not None:
            entries["bos_token_id"] = self.bos
        if self.eos:
            entries["eos_token_id"] = self.eos[0] if len(self.eos) == 1 else list(self.eos)
        if self.pad is not None:
            entries["pad_token_id"] = self.pad
        return entries


def _byte_level() -> PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _byte_level_single_digits() -> PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _byte_level()])


def _llama3() -> PreTokenizer:
    pattern = Regex(
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    split = pre_tokenizers.Split(pattern, behavior="isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([split, byte_level])


PRE_TOKENIZERS: Mapping[str, Callable[[], PreTokenizer]] = {
    "gpt-2": _byte_level,
    "llama-bpe": _llama3,
    "smollm": _byte_level_single_digits,
}


def write_tokenizer(metadata: GgufMetadata, folder: Path, *, max_length: int) -> ControlTokens:
    """Writes the two tokenizer files of a model into a folder.

    Args:
        metadata: The GGUF file's keys and values.
        folder: Where to write.
        max_length: The model's longest context in tokens, noted for other readers of the folder.

    Raises:
        UnsupportedModelError: The tokenizer is of a kind that is not understood.
    """
    tokens = metadata.require_list("tokenizer.ggml.tokens", str)
    tokenizer = _build_tokenizer(metadata, tokens)
    control = _control_tokens(metadata)
    config: dict[str, object] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_length,
    }
    named = {"bos_token": control.bos, "pad_token": control.pad}
    named["eos_token"] = control.eos[0] if control.eos else None
    named["unk_token"] = metadata.get("tokenizer.ggml.unknown_token_id", int)
    config |= {name: tokens[token] for name, token in named.items() if token is not None}
    if (template := metadata.get("tokenizer.chat_template", str)) is not None:
        config["chat_template"] = template
    if metadata.get("tokenizer.ggml.add_bos_token", bool) and control.bos is not None:
        bos = tokens[control.bos]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B:1", special_tokens=[(bos, control.bos)]
        )
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8"
    )
    return control


def _build_tokenizer(metadata: GgufMetadata, tokens: list[str]) -> Tokenizer:
    vocab = {token: number for number, token in enumerate(tokens)}
    if len(vocab) != len(tokens):
        raise UnsupportedModelError("The GGUF file lists one token twice.")
    kinds = metadata.require_list("tokenizer.ggml.token_type", int)
    model = metadata.require("tokenizer.ggml.model", str)
    if model == "llama":
        joined = [kind == TokenType.NORMAL for kind in kinds]
        tokenizer = build_sentencepiece(metadata, vocab, joined)
    elif model == "gpt2":
        tokenizer = _build_byte_level(metadata, vocab)
    else:
        raise UnsupportedModelError(
            f"The GGUF file's tokenizer is {model!r}; only byte-level BPE ('gpt2') and "
            "SentencePiece's ('llama') can be converted. Load the model's safetensors instead."
        )
    added = {TokenType.CONTROL: True, TokenType.USER_DEFINED: False}
    tokenizer.add_tokens(
        [
            AddedToken(token, special=added[TokenType(kind)], normalized=False)
            for token, kind in zip(tokens, kinds, strict=True)
            if kind in added
        ]
    )
    return tokenizer


def _build_byte_level(metadata: GgufMetadata, vocab: Mapping[str, int]) -> Tokenizer:
    pre = metadata.get("tokenizer.ggml.pre", str) or "gpt-2"
    if pre not in PRE_TOKENIZERS:
        raise UnsupportedModelError(
            f"The GGUF file splits text as {pre!r}; known are {', '.join(sorted(PRE_TOKENIZERS))}. "
            "Load the model's safetensors instead."
        )
    merges = [_merge(line) for line in metadata.require_list("tokenizer.ggml.merges", str)]
    tokenizer = Tokenizer(models.BPE(dict(vocab), merges, ignore_merges=pre == "llama-bpe"))
    tokenizer.pre_tokenizer = PRE_TOKENIZERS[pre]()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _merge(line: str) -> tuple[str, str]:
    left, separator, right = line.partition(" ")
    if not (left and separator and right):
        raise UnsupportedModelError(f"The GGUF file has a merge that is not a pair: {line!r}.")
    return left, right


def _control_tokens(metadata: GgufMetadata) -> ControlTokens:
    ends = [metadata.get(f"tokenizer.ggml.{name}_token_id", int) for name in ("eos", "eot", "eom")]
    return ControlTokens(
        bos=metadata.get("tokenizer.ggml.bos_token_id", int),
        eos=tuple(dict.fromkeys(token for token in ends if token is not None)),
        pad=metadata.get("tokenizer.ggml.padding_token_id", int),
    )
