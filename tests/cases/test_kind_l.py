"""Kind L of the case log: stop strings, characters in pieces, text of the prompt; by the engine.

The same at a cheaper layer, and as properties, stands in `tests/engine/test_detokenizer.py`.
"""

from collections.abc import Sequence
from typing import Any

import pytest
from bench import TENANT, Bench, finish_of, text_of, tokens_of
from tiny_tokenizers import build_tiny_tokenizer, byte_ids

from agentkv.core.request import FinishReason
from agentkv.engine.outputs import Update
from agentkv.engine.tokenizer import Tokenizer

TOKENIZER = Tokenizer(build_tiny_tokenizer())


def ids_of(text: str | bytes) -> list[int]:
    """One token for each byte."""
    return byte_ids(TOKENIZER.backend, text.encode() if isinstance(text, str) else text)


class Said:
    """An engine whose model says what it is told to."""

    def __init__(self, prompt: Sequence[int]) -> None:
        self.bench = Bench(end_token_ids=[2], tokenizer=TOKENIZER)
        self.root = self.bench.create(prompt)

    def say(self, context_id: str, ids: Sequence[int], **options: Any) -> Sequence[Update]:
        ordinal = self.bench.engine._store.get(TENANT, context_id).ordinal
        self.bench.runner.forced[ordinal] = list(ids)
        params = {"max_tokens": len(ids), "temperature": 1.0, "seed": 1, **options}
        return self.bench.finish(self.bench.start(context_id, **params))


def test_case_087_start_of_a_stop_string_is_streamed_before_it_completes() -> None:
    """Catches held text that leaks, that is lost, or that is kept although no stop can follow."""
    for rest, text, reason in (
        ("one wall", "a ", FinishReason.STOP),
        ("one will", "a stone will", FinishReason.LENGTH),
        ("", "a st", FinishReason.LENGTH),
    ):
        said = Said(ids_of("x"))
        updates = said.say(said.root, ids_of("a st" + rest), stop=("stone wall",))
        assert (text_of(updates), finish_of(updates).reason) == (text, reason)
        assert tokens_of(updates) == ids_of("a st" + rest)
        said.bench.end()


@pytest.mark.parametrize("include", [False, True])
def test_case_089_stop_ends_inside_a_token(include: bool) -> None:
    """Catches a text cut and a token cut that disagree, and a length that hides a token."""
    said = Said(ids_of("x"))
    pieces = [*TOKENIZER.encode("ok"), *TOKENIZER.encode("!?!")]
    assert len(pieces) == 2
    updates = said.say(said.root, pieces, stop=("!?",), include_stop=include)
    finish = finish_of(updates)
    assert text_of(updates) == ("ok!?" if include else "ok")
    assert (finish.stop, finish.num_tokens_before_stop) == ("!?", 1)
    assert finish.num_characters_before_stop == 2
    assert said.bench.length(said.root) == 3
    said.bench.extend(said.root, ids_of("yz"))
    assert tokens_of(said.say(said.root, ids_of("w"))) == ids_of("w")
    assert said.bench.tokens(said.root) == ids_of("x") + pieces + ids_of("yzw")
    said.bench.truncate(said.root, 1 + 1)  # where the stop began
    said.bench.end()


def test_a_stop_token_is_reported_with_its_place() -> None:
    """Catches a stop token whose place a client has to guess, or whose text leaks."""
    for include, text in ((False, "é"), (True, "é\n")):
        said = Said(ids_of("x"))
        (newline,) = ids_of("\n")
        options: dict[str, Any] = {"stop_token_ids": (newline,), "include_stop": include}
        updates = said.say(said.root, ids_of("é\nnever"), **options)
        finish = finish_of(updates)
        assert text_of(updates) == text
        assert (finish.num_tokens_before_stop, finish.num_characters_before_stop) == (2, 1)
        said.bench.end()


@pytest.mark.parametrize("text", ["😀!", "漢字", "e\u0301x", "👩‍👩‍👧"])
def test_case_090_each_token_decoded_alone_destroys_split_characters(text: str) -> None:
    """Catches halves sent as replacement characters, in a stream and after a fork between them."""
    ids = ids_of(text)
    for cut in range(1, len(ids)):
        said = Said(ids_of("x"))
        first = said.say(said.root, ids[:cut])
        assert "\ufffd" not in text_of(first)
        whole = text.encode()[:cut].decode(errors="ignore")
        for child in said.bench.fork(said.root, 2):
            rest = text_of(said.say(child, ids[cut:]))
            assert whole + rest == text
        said.bench.end()


@pytest.mark.parametrize("half", [1, 2, 3])
def test_case_092_prompt_ends_in_half_a_character(half: int) -> None:
    """Catches a prompt that is echoed, and a character that only one of two branches gets."""
    ids = ids_of("😀")
    prompt = ids_of("a prompt that is longer than what primes the text ")
    said = Said(prompt)
    said.bench.extend(said.root, ids[:half])
    for child in (*said.bench.fork(said.root, 2), said.root):
        updates = said.say(child, [*ids[half:], *ids_of("ok")])
        assert text_of(updates) == "😀ok"
    said.bench.end()
