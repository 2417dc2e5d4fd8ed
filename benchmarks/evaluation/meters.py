"""What a run is judged by: waiting times, tokens, and how full the pool was over time."""

from dataclasses import dataclass, field
from typing import NamedTuple

from agentkv.core.views import PoolView

SHARE_LATE = 0.05
"""Share of waits that may exceed a limit: the limits are for the 95th percentile."""


class Limits(NamedTuple):
    """What the 95th percentiles may be, in seconds."""

    first_token: float
    """From the call that forks (or resends) the context to its first token."""
    next_token: float
    """Between two tokens of one branch."""


class Moment(NamedTuple):
    """The pool at a time."""

    time: float
    given: float
    """Share of all blocks that contexts or reservations have, cached ones not among them."""
    filled: float
    """Share of all slots that hold a token's KV for a context."""


@dataclass(slots=True)
class Meter:
    """Adds up one run; what arrived before `since` warms up and is not counted."""

    since: float = 0.0
    first_tokens: list[float] = field(default_factory=list)
    next_tokens: list[float] = field(default_factory=list)
    num_turns: int = 0
    """Calls that ended."""
    num_tokens: int = 0
    """Tokens generated."""
    num_refused: int = 0
    given_when_refused: float | None = None
    """Share of blocks given at the first refusal."""
    moments: list[Moment] = field(default_factory=list)
    seconds: float = 0.0
    """Time counted."""
    _given: float = 0.0
    _filled: float = 0.0
    _allocated: float = 0.0
    _in_use: float = 0.0

    def pool(self, start: float, end: float, view: PoolView, reserved: int | None) -> None:
        """Takes in how the pool was from one time to another.

        What no context holds counts neither as given nor as filled: `used_slots` includes prefix
        cache, whose blocks are whole, so those slots are taken off.
        """
        total = view.total * view.block_size
        filled = view.used_slots - view.cached * view.block_size
        given = view.live if reserved is None else reserved
        self.moments.append(Moment(end, given / view.total, filled / total))
        seconds = end - max(start, self.since)
        if seconds > 0:
            self.seconds += seconds
            self._given += seconds * given / view.total
            self._filled += seconds * filled / total
            allocated = (view.live + view.cached) if reserved is None else reserved
            self._allocated += seconds * allocated * view.block_size
            self._in_use += seconds * (view.used_slots if reserved is None else filled)

    def refused(self, view: PoolView) -> None:
        """Counts a call that was refused for lack of blocks."""
        self.num_refused += 1
        if self.given_when_refused is None:
            self.given_when_refused = view.live / view.total

    @property
    def given(self) -> float:
        """Mean share of blocks that contexts or reservations had."""
        return self._given / self.seconds if self.seconds else 0.0

    @property
    def filled(self) -> float:
        """Mean share of all slots that held a token's KV for a context."""
        return self._filled / self.seconds if self.seconds else 0.0

    @property
    def filled_of_allocated(self) -> float:
        """Mean share of allocated slots, reserved or cached ones too, that held a token's KV."""
        return self._in_use / self._allocated if self._allocated else 1.0

    def meets(self, limits: Limits) -> bool:
        """Whether both 95th percentiles are within the limits."""
        return (
            percentile(self.first_tokens) <= limits.first_token
            and percentile(self.next_tokens) <= limits.next_token
        )


def percentile(values: list[float], share: float = 1 - SHARE_LATE) -> float:
    """Reads a percentile by nearest rank; 0 of no values."""
    if not values:
        return 0.0
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
