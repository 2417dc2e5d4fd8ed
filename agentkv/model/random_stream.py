"""Random numbers that are a pure function of (seed, ordinal, position).

It knows no tokens and keeps no state: a branch's draw for one position is the same in any batch,
after any preemption, in any process. The generator is Philox4x32-10 of J. Salmon et al.,
"Parallel random numbers: as easy as 1, 2, 3" (SC '11), computed for all rows at once; the seed
is its key, position and ordinal are its counter.
"""

import secrets
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from agentkv.core.batch import Stream
from agentkv.sampling_params import MAX_SEED

_MULTIPLIERS = np.array([[0xD2511F53], [0xCD9E8D57]], np.uint64)
_KEY_STEPS = np.array([[0x9E3779B9], [0xBB67AE85]], np.uint64)
_ROUNDS = 10
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)

Words = NDArray[np.uint64]
"""Values below 2**32, one per row; 64 bits wide so that products fit."""


class Draw(NamedTuple):
    """Names one random number: the stream of a branch and the position of the token to choose."""

    stream: Stream
    position: int


def fresh_seed() -> int:
    """Draws a seed in [0, 2**63) from the operating system, for a request that names none."""
    return secrets.randbelow(MAX_SEED)


def uniforms(draws: Sequence[Draw]) -> NDArray[np.float64]:
    """Draws one number for each row.

    Args:
        draws: What to draw; seeds in [0, 2**63), ordinals and positions in [0, 2**63).

    Returns:
        (num_draws,) multiples of 2**-53 in [0, 1).
    """
    seeds = np.array([draw.stream.seed for draw in draws], dtype=np.uint64)
    ordinals = np.array([draw.stream.ordinal for draw in draws], dtype=np.uint64)
    positions = np.array([draw.position for draw in draws], dtype=np.uint64)
    counter = (*_split(positions), *_split(ordinals))
    low, high, _, _ = philox4x32(counter, _split(seeds))
    bits = (high << _HALF | low) >> np.uint64(11)
    return bits.astype(np.float64) * 2.0**-53


def philox4x32(
    counter: tuple[Words, Words, Words, Words], key: tuple[Words, Words]
) -> tuple[Words, Words, Words, Words]:
    """Encrypts a counter of four 32-bit words under a key of two, in ten rounds.

    Args:
        counter: Four arrays of (num_rows,), least significant word first.
        key: Two arrays of (num_rows,).
    """
    # Words 0 and 2, and 1 and 3, side by side: half as many operations, which are what it costs.
    even, odd, keys = np.stack(counter[::2]), np.stack(counter[1::2]), np.stack(key)
    for _ in range(_ROUNDS):
        product = (even * _MULTIPLIERS)[::-1]
        even, odd = product >> _HALF ^ odd ^ keys, product & _LOW
        keys = (keys + _KEY_STEPS) & _LOW
    return even[0], odd[0], even[1], odd[1]


def _split(values: Words) -> tuple[Words, Words]:
    """Splits 64-bit numbers into a low and a high word."""
    return values & _LOW, values >> _HALF
