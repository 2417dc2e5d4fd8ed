"""Text and stops against the obvious way, decoding everything at once, with unlike tokenizers."""

from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_tokenizers import build_tiny_tokenizer
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers
from transformers import PreTrainedTokenizerFast

from agentkv.engine.detokenizer import Detokenizer
from agentkv.engine.tokenizer import Tokenizer

ALPHABET = "ab!é😀漢 \u0301\u200d\n"
"""Letters of one to four bytes, a combining accent and a joiner."""


def byte_fallback_tokenizer() -> PreTrainedTokenizerFast:
    """Builds one of SentencePiece's kind: `▁` for a space, and bytes for what has no piece."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁"]
    pieces += ["a", "b", "!", "é", "▁a", "ab", "▁ab", "a!", "!a"]
    merges = [("▁", "a"), ("a", "b"), ("▁a", "b"), ("a", "!"), ("!", "a")]
    vocab = {piece: number for number, piece in enumerate(pieces)}
    backend = Backend(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True))
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    backend.add_special_tokens(["<s>", "</s>"])
    factory: Any = PreTrainedTokenizerFast  # the library does not type its constructor
    made: PreTrainedTokenizerFast = factory(tokenizer_object=backend, unk_token="<unk>")
    return made


@cache
def tokenizer_of(kind: str) -> Tokenizer:
    return Tokenizer(build_tiny_tokenizer() if kind == "byte-level" else byte_fallback_tokenizer())


def expected_of(text: str, stops: list[str]) -> tuple[str, str | None]:
    """Finds the first complete stop, reading character by character; the longer of two."""
    for end in range(1, len(text) + 1):
        endings = [stop for stop in stops if text[:end].endswith(stop)]
        if endings:
            stopped = max(endings, key=len)
            return text[: end - len(stopped)], stopped
    return text, None


@pytest.mark.parametrize("kind", ["byte-level", "byte-fallback"])
@settings(max_examples=120, deadline=None)
@given(
    text=st.text(alphabet=ALPHABET, min_size=1, max_size=14),
    stops=st.lists(st.text(alphabet=ALPHABET, min_size=1, max_size=3), max_size=3),
    fork_at=st.integers(0, 40),
    include=st.booleans(),
)
def test_pieces_joined_are_the_text_up_to_the_first_stop(
    kind: str, text: str, stops: list[str], fork_at: int, include: bool
) -> None:
    """Catches a lost, doubled or half character, a leaked stop, or a place that is wrong."""
    tokenizer = tokenizer_of(kind)
    ids = tokenizer.encode(text)
    expected, stopped = expected_of(text, stops)
    prompt = tokenizer.encode("ab")
    detokenizer = Detokenizer(tokenizer, prompt, stops, include_stop=include)
    released, delta = "", None
    for number, token_id in enumerate(ids):
        if number == fork_at:
            twin = detokenizer
            detokenizer = detokenizer.fork()
            twin.push(token_id)  # what one branch does is nothing to the other
        delta = detokenizer.push(token_id)
        released += delta.text
        if delta.stopped is not None:
            break
        # What is held can still become a stop. Half a character holds what shares a token with it.
        decoded = tokenizer.decode(ids[: number + 1])
        held = decoded[len(released) :]
        is_whole = not decoded.endswith("\ufffd")
        assert not held or not is_whole or any(stop.startswith(held) for stop in stops)
    assert delta is not None
    assert delta.stopped == stopped
    if stopped is None:
        assert released + detokenizer.flush() == text
        assert detokenizer.num_characters == len(text)
        return
    assert released == (expected + stopped if include else expected)
    assert delta.num_characters_before_stop == len(expected)
    kept = delta.num_tokens_before_stop
    assert kept is not None
    assert expected.startswith(tokenizer.decode(ids[:kept]))
