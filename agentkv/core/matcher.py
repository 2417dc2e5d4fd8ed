"""What the scheduler needs of a constraint: a protocol. It knows no grammar and no tensor."""

from collections.abc import Sequence
from typing import Protocol

from agentkv.errors import AgentKVError


class AllowedTokens(Protocol):
    """Which tokens may be chosen; known by the time the model has run."""

    def bits(self) -> bytes:
        """Waits for one bit per token id: bit i % 8 of byte i // 8. Ids beyond may not be chosen.

        All zero when no token is allowed.
        """
        ...


class Matcher(AllowedTokens, Protocol):
    """Where one generation is in its grammar.

    It belongs to one request and is made anew for the next: what it holds follows from its
    grammar and the tokens since the grammar began, so a branch cannot see another's.
    """

    @property
    def error(self) -> AgentKVError | None:
        """Why it cannot go on; the generation must end."""
        ...

    @property
    def is_complete(self) -> bool:
        """Whether the text is whole and nothing may follow it."""
        ...

    def advance(self, token: int, limit: int) -> Sequence[int]:
        """Takes in a chosen token; returns up to `limit` tokens that must follow it, in order.

        Those are taken in as well.
        """
        ...
