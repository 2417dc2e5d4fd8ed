"""When the pool counts as full."""

from dataclasses import dataclass

from agentkv.config.requirement import require


@dataclass(frozen=True, slots=True, kw_only=True)
class PressureConfig:
    """When the pool counts as full."""

    soft: float = 0.75
    """Share of the blocks held by contexts from which pressure is SOFT, in (0, 1]."""
    hard: float = 0.9
    """Share of the blocks held by running requests and pins from which it is HARD, in (0, 1]."""
    hysteresis: float = 0.05
    """How far a share must fall below its threshold before the level does, in [0, 1)."""

    def __post_init__(self) -> None:
        for name in ("soft", "hard"):
            value = getattr(self, name)
            require(0 < value <= 1, f"{name} must be in (0, 1], got {value}.")
        require(
            0 <= self.hysteresis < min(self.soft, self.hard),
            f"hysteresis must be in [0, min(soft, hard)), got {self.hysteresis}.",
        )
