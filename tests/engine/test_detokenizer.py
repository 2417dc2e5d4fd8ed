"""Incremental text: no half characters, no text of the prompt, no part of a stop."""

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_tokenizers import build_tiny_tokenizer, byte_ids

from agentkv.engine.detokenizer import Detokenizer, TextDelta
from agentkv.engine.tokenizer import Tokenizer

TOKENIZER = Tokenizer(build_tiny_tokenizer())


def ids_of(*texts: str) -> list[int]:
    """One token for each text; the tokenizer has merges for the longer ones."""
    found = [TOKENIZER.encode(text) for text in texts]
    assert all(len(ids) == 1 for ids in found), found
    return [ids[0] for ids in found]


def bytes_of(text: str) -> list[int]:
    return byte_ids(TOKENIZER.backend, text.encode())


def push_all(detokenizer: Detokenizer, ids: Sequence[int]) -> list[TextDelta]:
    deltas = []
    for token_id in ids:
        deltas.append(detokenizer.push(token_id))
        if deltas[-1].stopped is not None:
            break
    return deltas


def text_of(deltas: Sequence[TextDelta]) -> str:
    return "".join(delta.text for delta in deltas)


def test_case_087_the_start_of_a_stop_is_withheld() -> None:
    """Catches a stop string whose first pieces were streamed before it was complete."""
    detokenizer = Detokenizer(TOKENIZER, [], ["stone wall"])
    deltas = push_all(detokenizer, ids_of("a", " st") + bytes_of("one wall"))
    assert text_of(deltas) == "a "
    assert deltas[-1] == TextDelta("", "stone wall", 1, 2)
    assert len(deltas) == 2 + len("one wall")


def test_case_087_what_is_no_stop_after_all_is_released_at_once() -> None:
    """Catches text that stays held, or is lost, when the stop does not come."""
    detokenizer = Detokenizer(TOKENIZER, [], ["stone wall"])
    assert text_of(push_all(detokenizer, ids_of("a", " st") + bytes_of("one w"))) == "a "
    assert detokenizer.push(bytes_of("i")[0]).text == "stone wi"
    assert text_of(push_all(detokenizer, bytes_of("ll"))) == "ll"
    assert detokenizer.flush() == ""


def test_case_087_held_text_is_flushed_at_the_end() -> None:
    """Catches the last words of an answer being swallowed by the hold-back."""
    detokenizer = Detokenizer(TOKENIZER, [], ["stone wall"])
    assert text_of(push_all(detokenizer, ids_of("a", " st"))) == "a "
    assert detokenizer.flush() == "st"
    assert detokenizer.flush() == ""


def test_case_087_only_the_ambiguous_tail_is_held() -> None:
    """Catches a hold-back of as many characters as the longest stop has."""
    detokenizer = Detokenizer(TOKENIZER, [], ["aab"])
    assert [delta.text for delta in push_all(detokenizer, bytes_of("aaaa"))] == ["", "", "a", "a"]
    last = detokenizer.push(bytes_of("b")[0])
    assert (last.text, last.stopped, last.num_tokens_before_stop) == ("", "aab", 2)


def test_case_089_a_stop_that_ends_inside_a_token() -> None:
    """Catches a text cut and a token cut that disagree when the stop is part of a token."""
    detokenizer = Detokenizer(TOKENIZER, [], ["!?"])
    deltas = push_all(detokenizer, ids_of("ok", "!?!"))
    assert text_of(deltas) == "ok"
    assert deltas[-1] == TextDelta("", "!?", 1, 2)


def test_case_089_a_stop_that_begins_inside_a_token() -> None:
    """Catches counting a token as before the stop though only a part of its text is."""
    detokenizer = Detokenizer(TOKENIZER, [], ["t one"])
    deltas = push_all(detokenizer, ids_of("ok", " st") + bytes_of(" one"))
    assert text_of(deltas) == "ok s"
    assert deltas[-1].num_tokens_before_stop == 1


def test_case_089_a_character_in_halves_is_one_piece_before_a_stop() -> None:
    """Catches a boundary inside a character, where truncating would leave half of it."""
    detokenizer = Detokenizer(TOKENIZER, [], ["x"])
    deltas = push_all(detokenizer, bytes_of("é😀x"))
    assert text_of(deltas) == "é😀"
    assert deltas[-1].num_tokens_before_stop == 6


def test_of_two_stops_the_one_complete_first_wins() -> None:
    """Catches a result that depends on how the text was cut into tokens."""
    for pieces in ([*bytes_of("the ok")], ids_of("the") + bytes_of(" ok")):
        detokenizer = Detokenizer(TOKENIZER, [], ["the ok", "he", "the"])
        deltas = push_all(detokenizer, pieces)
        assert (text_of(deltas), deltas[-1].stopped) == ("", "the")


@pytest.mark.parametrize("text", ["😀", "漢", "é", "a😀b漢c", "👩‍👩‍👧 ok"])
def test_case_090_split_characters_arrive_whole(text: str) -> None:
    """Catches each token being decoded alone, which turns emoji into replacement characters."""
    detokenizer = Detokenizer(TOKENIZER, bytes_of("say "))
    deltas = push_all(detokenizer, bytes_of(text))
    assert text_of(deltas) == text
    assert "\ufffd" not in text_of(deltas)


@pytest.mark.parametrize("num_before", [1, 2, 3])
def test_case_090_a_fork_between_the_halves(num_before: int) -> None:
    """Catches a byte buffer shared by two branches, or lost by one of them."""
    ids = bytes_of("😀")
    parent = Detokenizer(TOKENIZER, [])
    push_all(parent, ids[:num_before])
    children = [parent.fork(), parent.fork()]
    assert text_of(push_all(children[0], ids[num_before:])) == "😀"
    assert text_of(push_all(children[1], ids[num_before:] + bytes_of("!"))) == "😀!"
    assert text_of(push_all(parent, ids[num_before:])) == "😀"


def test_case_065_held_text_forks_by_value() -> None:
    """Catches a hold-back buffer that siblings share."""
    parent = Detokenizer(TOKENIZER, [], ["abcde"])
    push_all(parent, bytes_of("abc"))
    stops, goes_on, ends = parent.fork(), parent.fork(), parent.fork()
    assert push_all(stops, bytes_of("de"))[-1] == TextDelta("", "abcde", 0, 0)
    assert text_of(push_all(goes_on, bytes_of("xyz"))) == "abcxyz"
    assert ends.flush() == "abc"
    assert parent.flush() == "abc"


@pytest.mark.parametrize("num_in_prompt", [1, 2, 3])
def test_case_092_a_prompt_that_ends_in_half_a_character(num_in_prompt: int) -> None:
    """Catches a stream primed with the prompt that releases the prompt's text."""
    ids = bytes_of("😀")
    prompt = bytes_of("a prompt that is longer than what primes the stream ")
    detokenizer = Detokenizer(TOKENIZER, prompt + ids[:num_in_prompt])
    deltas = push_all(detokenizer, ids[num_in_prompt:] + bytes_of("ok"))
    assert [delta.text for delta in deltas if delta.text] == ["😀", "o", "k"]


def test_case_092_a_prompt_of_half_a_character_alone() -> None:
    """Catches priming that needs a whole character to begin with."""
    ids = bytes_of("漢")
    assert text_of(push_all(Detokenizer(TOKENIZER, ids[:2]), ids[2:])) == "漢"


@pytest.mark.parametrize("tail", [b"\xff", b"\xf0\x9f", "\ufffd".encode(), b"\xff" * 20])
def test_case_092_broken_bytes_at_the_end_of_a_prompt_are_not_repeated(tail: bytes) -> None:
    """Catches an echo of what the prompt left unfinished and the model never completed."""
    detokenizer = Detokenizer(TOKENIZER, byte_ids(TOKENIZER.backend, b"prompt" + tail))
    assert text_of(push_all(detokenizer, bytes_of("ok"))) == "ok"


def test_half_a_character_at_the_end_is_dropped() -> None:
    """Catches U+FFFD sent for a character that generation left unfinished."""
    detokenizer = Detokenizer(TOKENIZER, [])
    assert text_of(push_all(detokenizer, bytes_of("ok") + bytes_of("😀")[:2])) == "ok"
    assert detokenizer.flush() == ""


def test_a_space_that_shares_a_token_with_half_a_character_is_kept() -> None:
    """Catches a space lost at the end, and one that is sent twice when the character comes."""
    shared, *rest = TOKENIZER.encode(" 😀")
    assert len(rest) == 3
    detokenizer = Detokenizer(TOKENIZER, bytes_of("ok"))
    assert detokenizer.push(shared) == TextDelta("")
    assert detokenizer.fork().flush() == " "
    assert text_of(push_all(detokenizer, rest)) == " 😀"
    assert detokenizer.flush() == ""


def test_control_tokens_give_no_text() -> None:
    """Catches the end-of-turn marker being streamed as text, and ids beyond the tokenizer."""
    detokenizer = Detokenizer(TOKENIZER, [], ["zz"])
    beyond = TOKENIZER.vocab_size + 7
    deltas = push_all(detokenizer, [1, *bytes_of("o"), 2, beyond, *bytes_of("kzz")])
    assert text_of(deltas) == "ok"
    assert deltas[-1].num_tokens_before_stop == 5
    assert detokenizer.flush() == ""


@settings(max_examples=150, deadline=None)
@given(
    text=st.text(alphabet="ab!é😀漢 ", max_size=12),
    stops=st.lists(st.text(alphabet="ab!é ", min_size=1, max_size=3), max_size=3),
    fork_at=st.integers(0, 30),
)
def test_any_text_and_stops_match_a_reader_of_single_characters(
    text: str, stops: list[str], fork_at: int
) -> None:
    """Catches any difference from the obvious, slow way, with a fork in the middle."""
    expected, stopped = text, None
    for end in range(1, len(text) + 1):
        endings = [stop for stop in stops if text[:end].endswith(stop)]
        if endings:
            stopped = max(endings, key=len)
            expected = text[: end - len(stopped)]
            break
    detokenizer, released = Detokenizer(TOKENIZER, bytes_of("x"), stops), ""
    for number, token_id in enumerate(bytes_of(text)):
        if number == fork_at:
            detokenizer = detokenizer.fork()
        delta = detokenizer.push(token_id)
        released += delta.text
        if delta.stopped is not None:
            break
    else:
        delta = TextDelta("")
        released += detokenizer.flush()
    assert (released, delta.stopped) == (expected, stopped)
    if stopped is not None:
        assert delta.num_tokens_before_stop == len(expected.encode())
