"""Guesses the next tokens of a branch from its own past, and learns how far guesses can be trusted.

Text that is edited, extracted or quoted repeats what stands before it: where the last few tokens
occurred earlier, what followed then is a good guess of what follows now (prompt lookup decoding,
A. Saxena 2023; the general scheme is that of Y. Leviathan et al. 2023). A guess is checked by the
model before anybody sees it, so this module decides how fast generation is and never what it says.
"""

import math
from array import array
from collections.abc import Callable

LOOKBACK = 8192
"""Tokens before the end that are searched."""
LONGEST_MATCH = 4
SHORTEST_MATCH = 2
"""Tokens that must have occurred before: one alone occurs everywhere and tells little."""
_FIRST_TRUST = 0.7
_GAIN = 0.15
"""Weight of each new trial in the estimate: some seven of them outweigh what was believed."""
_EXPLORE_EVERY = 16

Propose = Callable[["array[int]", int], list[int]]
"""Guesses at most so many tokens that follow these; may return fewer, or none."""


def look_up(tokens: "array[int]", limit: int) -> list[int]:
    """Finds the last earlier occurrence of the longest run at the end; guesses what followed it.

    What follows may run into the end itself: then the text is taken to be periodic.

    Args:
        tokens: The end of a branch.
        limit: Most tokens to guess, at least 1.

    Returns:
        `limit` tokens, or none without a match.
    """
    for length in range(min(LONGEST_MATCH, len(tokens) - 1), SHORTEST_MATCH - 1, -1):
        follows = _after_last_match(tokens, length)
        if follows is not None:
            period = len(tokens) - follows
            return [tokens[follows + number % period] for number in range(limit)]
    return []


def _after_last_match(tokens: "array[int]", length: int) -> int | None:
    """Finds the position after the last earlier occurrence of the last `length` tokens."""
    size, data = tokens.itemsize, tokens.tobytes()
    pattern = data[-length * size :]
    end = len(data) - size  # an occurrence may overlap the end, but must not be it
    while (found := data.rfind(pattern, 0, end)) >= 0:
        if found % size == 0:
            return found // size + length
        end = found + len(pattern) - 1
    return None


class Drafter:
    """How many tokens to guess at each step of one request.

    A row of a step costs the more, the more rows there are beside it: `num_rows / (num_rows +
    fixed_rows)` of what the step yields. The k-th guess is right if all before it are, with a
    probability of about `trust ** k`; it is made if that is worth its row. So drafts get longer
    while they are right, and end where they are not or where the batch is large. Now and then one
    token is guessed all the same, since only trials can restore trust.
    """

    __slots__ = ("_num_passed", "max_tokens", "trust")

    def __init__(self, max_tokens: int) -> None:
        assert max_tokens >= 1
        self.max_tokens = max_tokens
        """Most tokens of one draft."""
        self.trust = _FIRST_TRUST
        """Estimated probability that a guess after right ones is right, in [0, 1]."""
        self._num_passed = 0

    def length(self, num_rows: int, fixed_rows: float) -> int:
        """Says how many tokens are worth guessing.

        Args:
            num_rows: Rows of the step without drafts, at least 1.
            fixed_rows: What a step costs before its first row, in rows.
        """
        price = num_rows / (num_rows + fixed_rows)
        if self.trust >= 1:
            return self.max_tokens
        count = int(math.log(price) / math.log(self.trust)) if self.trust > 0 and price > 0 else 0
        if count >= 1:
            self._num_passed = 0
            return min(count, self.max_tokens)
        self._num_passed += 1
        if self._num_passed < _EXPLORE_EVERY:
            return 0
        self._num_passed = 0
        return 1

    def record(self, num_drafted: int, num_accepted: int) -> None:
        """Learns from a draft that was checked."""
        assert 0 <= num_accepted <= num_drafted
        for is_right in [True] * num_accepted + [False] * (num_accepted < num_drafted):
            self.trust += _GAIN * (is_right - self.trust)
