"""Use in the last so many seconds."""

import pytest

from agentkv.core.sliding_sum import SlidingSum


def test_counts_what_is_within_the_window_and_nothing_older() -> None:
    """Catches use that is forgotten early, or kept for more than a slice too long."""
    used = SlidingSum(60.0)
    used.add(0.0, 10.0, 5.0)
    assert used.total(10.0) == pytest.approx(50.0)
    assert used.total(60.0) == pytest.approx(50.0)
    assert used.total(65.0) == pytest.approx(25.0)
    assert used.total(72.0) == 0.0


def test_a_long_hold_counts_a_window_of_it() -> None:
    """Catches a loop, or a sum, that grows with the time nobody looked."""
    used = SlidingSum(60.0)
    used.add(0.0, 1e9, 2.0)
    assert 120.0 <= used.total(1e9) <= 122.0


def test_says_when_it_falls_below() -> None:
    """Catches a retry hint that is too early, or one where waiting never helps."""
    used = SlidingSum(60.0)
    used.add(0.0, 10.0, 10.0)
    assert used.wait_until_below(101.0, 10.0, 0.0) == 0.0
    wait = used.wait_until_below(50.0, 10.0, 0.0)
    assert wait is not None
    assert used.wait_until_below(50.0, 10.0, 1.0) is None
    assert used.total(10.0 + wait - 1.5) >= 50.0
    assert used.total(10.0 + wait) < 50.0
