"""Where KV can lie, and what is to be carried from one place to another.

Like copy-on-write, moving is decided in core and done in model. It names blocks of tiers, never
tensors, files or devices.
"""

from enum import IntEnum
from typing import NamedTuple


class Tier(IntEnum):
    """A kind of memory for KV; the lower, the larger and slower."""

    DEVICE = 0
    """Where attention reads: the only tier a step can use."""
    HOST = 1
    """Memory of the computer."""
    DISK = 2
    """Files."""


LOWER_TIERS = (Tier.HOST, Tier.DISK)


class Place(NamedTuple):
    """One block of one tier."""

    tier: Tier
    block_id: int


class BlockMove(NamedTuple):
    """Carry all slots of one block, all layers, to another tier.

    Moves of a step are done in order, before its copies and writes: a place may be read by one
    move and reused by a later one.
    """

    src: Place
    dst: Place


class MoveCosts(NamedTuple):
    """What bringing KV back costs either way, in seconds, as measured so far."""

    recompute_token: float = 1.0
    """Computing the KV of one token again."""
    move_block: float = 0.0
    """Carrying one block off the device and back."""

    def moving_pays(self, block_size: int) -> bool:
        """Whether a block is better carried than computed again."""
        return self.move_block < self.recompute_token * block_size
