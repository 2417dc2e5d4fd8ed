"""A compiled constraint, and where one generation is in it.

It owns the rule that a matcher's state is a function of the grammar and of the tokens since the
grammar began, and of nothing else. Forks, truncation, preemption and a later generation therefore
need no copy of it and cannot disturb it: who goes on replays the tokens, which takes some
microseconds for each, beside the model's work. It knows no context and no model.
"""

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from llguidance import LLMatcher, LLTokenizer

from agentkv.constraint import Constraint
from agentkv.errors import AgentKVError, InvalidRequest, Reason

MAX_ERROR_CHARACTERS = 400


@dataclass(frozen=True, slots=True, eq=False)
class Grammar:
    """A constraint in terms of one model's tokens; shared by all that use it, never changed."""

    constraint: Constraint
    tokenizer: LLTokenizer
    prototype: LLMatcher
    """At its beginning; copied, never advanced."""

    @property
    def num_words(self) -> int:
        """32-bit words of a mask: one bit for each token id."""
        return (self.tokenizer.vocab_size + 31) // 32


class GrammarMatcher:
    """Where one generation is in its grammar; a `Matcher` of the scheduler's.

    Runs of tokens that must follow one another are found as a whole, so that they are split into
    tokens as the tokenizer would split them; until such a run has passed, nothing else is allowed.
    That holds whether a run is committed at once (`jumps`) or token by token, so both give the
    same tokens.

    Invariant: touched on the mask maker's thread from `begin` until `bits` returns, and on the
    engine's thread otherwise.
    """

    def __init__(self, grammar: Grammar, history: Sequence[int], *, jumps: bool) -> None:
        """Begins after some tokens of the grammar, which are replayed at first use.

        Args:
            grammar: What to follow.
            history: Tokens since the grammar began; those of an earlier generation.
            jumps: Whether tokens that must follow are committed at once.
        """
        self.grammar = grammar
        self._history = history
        self._jumps = jumps
        self._state: LLMatcher | None = None
        self._forced: deque[int] = deque()
        self._row: Future[bytes] | None = None
        self._error: AgentKVError | None = None

    @property
    def error(self) -> AgentKVError | None:
        """Why it cannot go on: its limits, or a history that does not fit."""
        return self._error

    @property
    def is_complete(self) -> bool:
        """Whether the text is whole and nothing may follow it."""
        return (
            self._error is None
            and not self._forced
            and self._state is not None
            and self._state.is_stopped()
        )

    def begin(self, row: "Future[bytes]") -> None:
        """Notes where the mask of the next token will be."""
        self._row = row

    def bits(self) -> bytes:
        """Waits for the mask of the next token."""
        assert self._row is not None, "no mask was begun for this step"
        row, self._row = self._row.result(), None
        return row

    def advance(self, token: int, limit: int) -> Sequence[int]:
        """Takes in a chosen token; returns the tokens that must follow it, at most `limit`."""
        self._consume(token)
        run: list[int] = []
        while self._jumps and self._forced and len(run) < limit and self._error is None:
            run.append(self._forced[0])
            self._consume(run[-1])
        return run

    # -- on the mask maker's thread ----------------------------------------------------------

    def open(self) -> LLMatcher | None:
        """Makes ready for a mask; None when `mask_alone` has the answer."""
        if self._state is None:
            self._state = self.grammar.prototype.deep_copy()
            self._look_ahead()
            for number, token in enumerate(self._history):
                self._consume(token)
                if self._error is not None:
                    self._error = _misfit(number)
            self._history = ()
        return None if self._forced or self._error is not None else self._state

    def mask_alone(self, row: bytearray) -> None:
        """Allows the one token that must follow; none after an error."""
        if self._forced and self._error is None:
            token = self._forced[0]
            row[token >> 3] |= 1 << (token & 7)

    def close(self) -> None:
        """Looks whether a mask could be made; it is empty otherwise."""
        self._has_failed()

    # -- inside ------------------------------------------------------------------------------

    def _consume(self, token: int) -> None:
        assert self._state is not None
        if self._error is not None:
            return
        if self._forced and self._forced[0] == token:
            self._forced.popleft()
        else:  # the caller's own, or no run under way
            self._forced.clear()
        self._state.consume_token(token)
        self._look_ahead()

    def _look_ahead(self) -> None:
        """Finds the run of tokens that must follow, once the one before has passed."""
        assert self._state is not None
        if not self._has_failed() and not self._forced and not self._state.is_stopped():
            self._forced.extend(self._state.compute_ff_tokens())
            self._has_failed()

    def _has_failed(self) -> bool:
        assert self._state is not None
        if self._error is None and self._state.is_error():
            self._error = InvalidRequest(
                "The text can no longer be matched with its constraint: "
                f"{first_line(self._state.get_error())}",
                reason=Reason.GRAMMAR_REJECTED,
            )
        return self._error is not None


def first_line(message: str) -> str:
    """Cuts a message of the library to what is worth reading."""
    return message.strip().partition("\n")[0][:MAX_ERROR_CHARACTERS]


def _misfit(number: int) -> AgentKVError:
    return InvalidRequest(
        f"The context's text does not follow the constraint it should continue: token {number} "
        "after its beginning does not fit. Truncate to there, or constrain anew.",
        reason=Reason.GRAMMAR_REJECTED,
        metadata={"position": number},
    )
