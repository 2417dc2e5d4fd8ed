"""The engine's two clocks: the time of day, and one for bills, which only grows."""

import time
from collections.abc import Callable

from agentkv.core.ledger import Ledger


class EngineClock:
    """What time it is. Whoever changes contexts or blocks calls `tick` first."""

    def __init__(
        self,
        ledger: Ledger,
        clock: Callable[[], float] = time.time,
        timer: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ledger = ledger
        self._clock = clock
        self._timer = timer

    def now(self) -> float:
        """Tells the time in seconds since the epoch."""
        return self._clock()

    def tick(self) -> None:
        """Tells the ledger the time, before anything changes."""
        self._ledger.advance(self._timer())
