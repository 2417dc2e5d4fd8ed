"""Token ids to text, one at a time, and the stop texts that end it.

It owns half characters and held-back text of one branch; both fork by value. It knows no model and
no stream. Text leaves in whole characters, and only when it can no longer be part of a stop:

    decoded:   released | held back | bytes of half a character
               sent       may become a stop, or is one
"""

import copy
from collections.abc import Sequence
from typing import NamedTuple

from tokenizers.decoders import DecodeStream

from agentkv.engine.tokenizer import Tokenizer

PRIMING_TOKENS = 16
"""Tokens of the prompt that decide how the first generated ones are written: spaces, halves."""
MAX_HALF_TOKENS = 3
"""Most tokens that can hold an unfinished character: UTF-8 has at most 4 bytes."""
REPLACEMENT = "\ufffd"


class TextDelta(NamedTuple):
    """Text that one token released."""

    text: str
    stopped: str | None = None
    """The stop text that is complete now; its text is withheld."""
    num_tokens_before_stop: int | None = None
    """Tokens pushed whose text lies wholly before the stop; None when nothing stopped."""
    num_characters_before_stop: int | None = None
    """Characters of the text before the stop; None when nothing stopped."""


class _Boundary(NamedTuple):
    """After `num_tokens` tokens the text has `length` characters and no half one."""

    num_tokens: int
    length: int


class Detokenizer:
    """Text of one branch, incrementally.

    Invariants: no released text is part of a stop, unless the stop is complete and wanted; what is
    held back is a beginning of some stop, or empty; the pieces joined, with the flushed rest, are
    the decoded text up to the stop.
    A whole character that shares a token with half of the next one waits for the other half.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int],
        stops: Sequence[str] = (),
        *,
        include_stop: bool = False,
    ) -> None:
        """Begins after a prompt, none of whose text is ever released.

        A character whose first bytes end the prompt is released whole, once its last byte is
        generated.

        Args:
            tokenizer: The model's tokenizer.
            prompt_ids: The tokens before the first one that will be pushed; the last 16 matter.
            stops: Texts that end generation, none empty.
            include_stop: Release the text of the stop as well, and nothing after it.
        """
        assert all(stops), "an empty text would stop at once"
        self._tokenizer = tokenizer
        self._stops = tuple(stops)
        self._includes_stop = include_stop
        self._longest_stop = max(map(len, self._stops), default=0)
        self._held = ""
        self._length = 0  # characters decoded, held ones included
        self._num_tokens = 0
        self._boundaries = [_Boundary(0, 0)]
        self._half_ids: list[int] = []  # pushed since the last whole character
        self._stopped = False
        self._prime(list(prompt_ids[-PRIMING_TOKENS:]))

    @property
    def num_characters(self) -> int:
        """Characters of the text so far, held ones included and half ones not."""
        return self._length

    def push(self, token_id: int) -> TextDelta:
        """Adds one token and returns the text that it released, which is often empty.

        Must not be called after a delta that stopped.
        """
        assert not self._stopped, "a branch that stopped takes no more tokens"
        self._num_tokens += 1
        piece = self._stream.step(self._tokenizer.backend, token_id)
        if piece is None:
            self._note_textless(token_id)
            return TextDelta("")
        piece = self._drop_echo(piece)
        self._half_ids.clear()
        self._length += len(piece)
        if not self._stops:
            return TextDelta(piece)
        self._held += piece
        self._boundaries.append(_Boundary(self._num_tokens, self._length))
        return self._release()

    def flush(self) -> str:
        """Returns the text held back at the end of generation; half a character is dropped."""
        text = self._held
        if self._half_ids:
            rest = self._tokenizer.decode(self._half_ids).rstrip(REPLACEMENT)
            text += rest
            self._length += len(rest)
        self._held = ""
        self._half_ids.clear()
        return text

    def fork(self) -> "Detokenizer":
        """Copies the state, so that both go on alone: half characters and held text included."""
        twin = copy.copy(self)
        twin._stream = copy.copy(self._stream)
        twin._boundaries = self._boundaries.copy()
        twin._half_ids = self._half_ids.copy()
        return twin

    def _prime(self, tail: list[int]) -> None:
        """Shows the stream the end of the prompt.

        A stream shown a prompt that ends in half a character would later release the prompt's
        whole text, so it is shown the whole characters first and then pushed the rest.
        """
        decode = self._tokenizer.decode
        self._echo = 0
        for num_half in range(min(MAX_HALF_TOKENS, len(tail)) + 1):
            whole = tail[: len(tail) - num_half]
            if not decode(whole).endswith(REPLACEMENT):
                break
        else:  # the prompt ends in bytes that are no text
            whole, tail = [], []
        self._stream = DecodeStream(ids=whole, skip_special_tokens=True)
        for token_id in tail[len(whole) :]:
            piece = self._stream.step(self._tokenizer.backend, token_id)
            assert piece is None, "half a character gave text"
        if len(tail) > len(whole):
            text = decode(tail)
            self._echo = len(text) - len(text.rstrip(REPLACEMENT))

    def _drop_echo(self, piece: str) -> str:
        """Drops what the first piece repeats of a prompt whose last bytes were never completed."""
        for _ in range(self._echo):
            piece = piece.removeprefix(REPLACEMENT)
        self._echo = 0
        return piece

    def _note_textless(self, token_id: int) -> None:
        """Tells a token without text from the first bytes of a character."""
        if self._half_ids or self._tokenizer.decode([token_id]):
            self._half_ids.append(token_id)
        elif self._stops:
            self._boundaries.append(_Boundary(self._num_tokens, self._length))

    def _release(self) -> TextDelta:
        if (stop := self._first_stop()) is not None:
            self._stopped = True
            start = self._held.index(stop.text, stop.end - len(stop.text))
            offset = self._length - len(self._held) + start
            before = max(b.num_tokens for b in self._boundaries if b.length <= offset)
            text, self._held = self._held[: stop.end if self._includes_stop else start], ""
            return TextDelta(text, stop.text, before, offset)
        keep = self._num_ambiguous()
        cut = len(self._held) - keep
        text, self._held = self._held[:cut], self._held[cut:]
        released = self._length - keep
        while len(self._boundaries) > 1 and self._boundaries[1].length <= released:
            del self._boundaries[0]
        return TextDelta(text)

    def _first_stop(self) -> "_Match | None":
        """Finds the stop that is complete first; of two that end together, the longer.

        That is the one a reader of single characters would see, so the result does not depend on
        how the text is cut into tokens.
        """
        found = [
            _Match(position + len(stop), stop)
            for stop in self._stops
            if (position := self._held.find(stop)) >= 0
        ]
        return min(found, key=lambda match: (match.end, -len(match.text)), default=None)

    def _num_ambiguous(self) -> int:
        """Counts the characters at the end of the held text that may begin a stop."""
        for num in range(min(self._longest_stop - 1, len(self._held)), 0, -1):
            tail = self._held[-num:]
            if any(stop.startswith(tail) for stop in self._stops):
                return num
        return 0


class _Match(NamedTuple):
    """A stop text and where it ends in the held text."""

    end: int
    text: str
