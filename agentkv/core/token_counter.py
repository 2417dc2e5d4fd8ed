"""How often each token occurred on one branch, for penalties.

A counter is derived from committed tokens when a request begins, and told of each token that the
request commits: it is a cache of what the tokens say, and holds nothing that they do not.
"""

from array import array
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import NamedTuple


class TokenCounts(NamedTuple):
    """A counter at one moment; both arrays have one entry for each token that occurred."""

    token_ids: "array[int]"
    counts: "array[int]"


class TokenCounter:
    """Counts tokens; forks by value.

    Invariant: `snapshot()` equals that of a new counter of the same tokens, but for the order.
    """

    __slots__ = ("_counts", "_places", "_token_ids")

    def __init__(self, tokens: Iterable[int] = ()) -> None:
        counted = Counter(tokens)
        self._token_ids = array("I", counted.keys())
        self._counts = array("I", counted.values())
        self._places = {token: place for place, token in enumerate(self._token_ids)}

    def add(self, token: int) -> None:
        """Counts one more token."""
        place = self._places.setdefault(token, len(self._token_ids))
        if place == len(self._token_ids):
            self._token_ids.append(token)
            self._counts.append(0)
        self._counts[place] += 1

    def fork(self) -> "TokenCounter":
        """Copies the counts, so that both go on alone."""
        twin = TokenCounter()
        twin._token_ids, twin._counts = self._token_ids[:], self._counts[:]
        twin._places = self._places.copy()
        return twin

    def snapshot(self) -> TokenCounts:
        """Copies the counts as they are now."""
        return TokenCounts(self._token_ids[:], self._counts[:])

    def snapshots(self, tokens: Iterable[int]) -> Iterator[TokenCounts]:
        """Yields the counts as they are, and as they would be after each of some more tokens."""
        twin = self.fork()
        yield self.snapshot()
        for token in tokens:
            twin.add(token)
            yield twin.snapshot()
