"""How full a pool is: one of three levels, which do not flicker.

It keeps the level and knows nothing of who holds what.
"""

from enum import StrEnum

from agentkv.config import PressureConfig


class PressureLevel(StrEnum):
    """How hard it is to have a block."""

    OK = "ok"
    """Blocks are free, or cache that nobody counts on."""
    SOFT = "soft"
    """Most blocks are held by contexts: idle ones are about to give way."""
    HARD = "hard"
    """Most blocks are held by running requests and pins: what comes now may wait or be refused."""


class PressureGauge:
    """The level of one pool.

    SOFT follows the share of blocks held by contexts, HARD the share of those that running
    requests and pins hold. A level is entered at its threshold and left `hysteresis` below it.
    """

    def __init__(self, config: PressureConfig) -> None:
        self._config = config
        self._is_soft = self._is_hard = False

    def read(self, *, held: int, firm: int, total: int) -> PressureLevel:
        """Moves the level to what the pool is now and returns it.

        Args:
            held: Blocks held by contexts.
            firm: Those of them that only the end of a request or a pin gives back.
            total: Blocks of the pool.
        """
        config = self._config
        self._is_soft = self._is_above(held / total, config.soft, self._is_soft)
        self._is_hard = self._is_above(firm / total, config.hard, self._is_hard)
        if self._is_hard:
            return PressureLevel.HARD
        return PressureLevel.SOFT if self._is_soft else PressureLevel.OK

    def _is_above(self, share: float, threshold: float, was_above: bool) -> bool:
        return share >= threshold - (self._config.hysteresis if was_above else 0)
