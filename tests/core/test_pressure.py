"""The level of a pool, as blocks come and go."""

import pytest

from agentkv.config import LeaseConfig, PressureConfig
from agentkv.core.pressure import PressureGauge, PressureLevel
from agentkv.errors import InvalidRequest


def test_a_level_does_not_flicker() -> None:
    """Catches a level that changes with every block around its threshold, or that sticks."""
    gauge = PressureGauge(PressureConfig(soft=0.5, hard=0.8, hysteresis=0.1))
    held = [40, 50, 45, 41, 40, 39, 49, 50]
    levels = [gauge.read(held=blocks, firm=0, total=100) for blocks in held]
    assert levels == ["ok", "soft", "soft", "soft", "soft", "ok", "ok", "soft"]


def test_hard_is_what_cannot_give_way() -> None:
    """Catches idle contexts, which give way, taken for a pool that is full."""
    gauge = PressureGauge(PressureConfig())
    assert gauge.read(held=100, firm=10, total=100) is PressureLevel.SOFT
    assert gauge.read(held=100, firm=95, total=100) is PressureLevel.HARD
    assert gauge.read(held=95, firm=86, total=100) is PressureLevel.HARD
    assert gauge.read(held=0, firm=0, total=100) is PressureLevel.OK


@pytest.mark.parametrize(
    "settings",
    [{"soft": 0.0}, {"hard": 1.1}, {"hysteresis": -0.1}, {"hard": 0.1, "hysteresis": 0.2}],
)
def test_thresholds_are_checked(settings: dict[str, float]) -> None:
    """Catches a threshold that no pool ever meets, or never leaves."""
    with pytest.raises(InvalidRequest):
        PressureConfig(**settings)


@pytest.mark.parametrize(
    "settings",
    [
        {"default_ttl": 0.0},
        {"max_ttl": float("inf")},
        {"default_ttl": 10.0, "max_ttl": 5.0},
        {"pin_quota": 1.5},
        {"handle_retention": -1.0},
        {"warning": -1.0},
    ],
)
def test_lease_settings_are_checked(settings: dict[str, float]) -> None:
    """Catches an operator's mistake that shows only when the first lease ends."""
    with pytest.raises(InvalidRequest):
        LeaseConfig(**settings)
