"""What is guessed, and when guessing is worth it."""

from array import array

import pytest

from agentkv.core.drafter import Drafter, look_up


@pytest.mark.parametrize(
    ("tokens", "limit", "expected"),
    [
        ([1, 2, 3, 4, 5, 9, 1, 2], 3, [3, 4, 5]),
        ([1, 2, 8, 1, 2, 7, 1, 2], 2, [7, 1]),  # the last occurrence counts
        ([5, 1, 2, 8, 6, 1, 2, 7, 5, 1, 2], 1, [8]),  # the longest match counts more
        ([3, 4, 3, 4], 5, [3, 4, 3, 4, 3]),  # periodic beyond the end
        ([6, 6, 6], 4, [6, 6, 6, 6]),  # an occurrence that overlaps the end
        ([1, 2, 3, 4], 4, []),
        ([1, 9, 1], 4, []),  # one token alone is no match
        ([7], 4, []),
        ([256, 1, 0, 3, 65536, 256], 4, []),  # bytes alike, tokens not
    ],
)
def test_what_is_guessed(tokens: list[int], limit: int, expected: list[int]) -> None:
    """Catches guesses from the wrong place, misaligned matches, and a read beyond the end."""
    assert look_up(array("I", tokens), limit) == expected


def test_drafts_follow_their_success() -> None:
    """Catches a draft that stays long while it is wrong, or never comes back."""
    drafter = Drafter(8)
    for _ in range(20):
        drafter.record(4, 4)
    assert drafter.length(1, 12) == 8
    for _ in range(20):
        drafter.record(4, 0)
    lengths = [drafter.length(1, 12) for _ in range(32)]
    assert sum(lengths) == 2, "now and then one token is tried"
    for _ in range(12):
        drafter.record(1, 1)
    assert drafter.length(1, 12) > 4


def test_rows_get_dearer_with_the_batch() -> None:
    """Catches drafts that slow a large batch down, or a device on which rows are free unused."""
    lengths = [Drafter(64).length(num_rows, 12.0) for num_rows in (1, 4, 16, 64)]
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] > 4 and lengths[-1] == 0
    assert Drafter(64).length(64, 1000.0) > 4
    assert Drafter(64).length(1, 0.0) == 0
