"""Random numbers as a pure function of seed, ordinal and position."""

import numpy as np
import pytest

from agentkv.core.batch import Stream
from agentkv.model.random_stream import Draw, Words, fresh_seed, philox4x32, uniforms
from agentkv.sampling_params import MAX_SEED

ONES = 0xFFFFFFFF
PI = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)


def words(*values: int) -> list[Words]:
    return [np.array([value], dtype=np.uint64) for value in values]


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((ONES,) * 4, (ONES,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (PI, (0xA4093822, 0x299F31D0), (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
    ],
)
def test_philox_gives_the_published_answers(
    counter: tuple[int, int, int, int], key: tuple[int, int], expected: tuple[int, ...]
) -> None:
    """Catches a slip in the rounds, which would still look random (known answers of Random123)."""
    c0, c1, c2, c3 = words(*counter)
    k0, k1 = words(*key)
    assert tuple(int(word[0]) for word in philox4x32((c0, c1, c2, c3), (k0, k1))) == expected


def test_a_draw_does_not_depend_on_its_neighbours() -> None:
    """Catches a stream that is advanced by whoever else is in the batch."""
    draws = [
        Draw(Stream(seed, ordinal), position)
        for seed in (0, 7, MAX_SEED - 1)
        for ordinal in (0, 1, 4095)
        for position in (0, 5, 2**40)
    ]
    together = uniforms(draws)
    assert [float(uniforms([draw])[0]) for draw in draws] == together.tolist()
    assert len(set(together.tolist())) == len(draws)


def test_the_numbers_are_uniform_over_each_coordinate() -> None:
    """Catches positions or ordinals that are correlated (chi-square, 64 bins, p > 1e-4)."""
    by_position = [Draw(Stream(1, 0), position) for position in range(20_000)]
    by_ordinal = [Draw(Stream(1, ordinal), 3) for ordinal in range(20_000)]
    by_seed = [Draw(Stream(seed, 0), 3) for seed in range(20_000)]
    for draws in (by_position, by_ordinal, by_seed):
        numbers = uniforms(draws)
        assert numbers.min() >= 0.0
        assert numbers.max() < 1.0
        counts, _ = np.histogram(numbers, bins=64, range=(0, 1))
        expected = len(draws) / 64
        assert ((counts - expected) ** 2 / expected).sum() < 113.0  # 63 degrees of freedom
        pairs = np.corrcoef(numbers[:-1], numbers[1:])[0, 1]
        assert abs(pairs) < 0.03


def test_case_064_seeds_for_requests_without_one_are_fresh() -> None:
    """Catches a constant default seed, or one that follows from the process's history."""
    seeds = {fresh_seed() for _ in range(100)}
    assert len(seeds) == 100
    assert all(0 <= seed < MAX_SEED for seed in seeds)
