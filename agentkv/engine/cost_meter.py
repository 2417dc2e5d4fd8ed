"""What a step and a move cost on this machine, learned from those that ran.

Plain numbers for the decision whether KV that gives way is carried off or computed again. It
decides nothing, and reads the time from a function passed in.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from agentkv.core.block_move import MoveCosts

FEWEST_ROWS = 8
"""Smaller steps say little: they cost about the same whatever they compute."""
WEIGHT = 0.2
"""Of the newest measurement in the running mean."""


class CostMeter:
    """Running means of seconds per token computed and per block moved."""

    def __init__(self, timer: Callable[[], float]) -> None:
        self._timer = timer
        self._token: float | None = None
        self._move: float | None = None

    @contextmanager
    def computing(self, num_rows: int) -> Iterator[None]:
        """Measures a step; one that raises is not counted."""
        before = self._timer()
        yield
        if num_rows >= FEWEST_ROWS:
            self._token = _mean(self._token, (self._timer() - before) / num_rows)

    @contextmanager
    def moving(self, num_blocks: int) -> Iterator[None]:
        """Measures moves."""
        before = self._timer()
        yield
        self._move = _mean(self._move, (self._timer() - before) / num_blocks)

    def costs(self) -> MoveCosts:
        """Answers what is known: until both have been seen, moving is taken to be cheaper.

        A block is moved twice, out and back.
        """
        if not self._token or self._move is None:
            return MoveCosts()
        return MoveCosts(self._token, 2 * self._move)


def _mean(known: float | None, new: float) -> float:
    return new if known is None else (1 - WEIGHT) * known + WEIGHT * new
