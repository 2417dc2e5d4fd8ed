"""How contestants give memory to contexts: in blocks as they grow, or reserved in one piece.

Owns the arithmetic of reservations and the pool they come from. The forms are those that the
PagedAttention paper (Kwon et al., SOSP 2023, section 6.1) compares with: Orca with the maximum
length, the next power of two and the true length ("oracle"), and FasterTransformer with the
maximum length and whole requests as a batch. It knows no engine.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple


class Reserve(StrEnum):
    """How many tokens' room a context gets in one piece, before it runs."""

    MAXIMUM = "maximum length"
    POWER = "next power of two"
    ORACLE = "oracle length"

    def tokens(self, length: int, longest: int) -> int:
        """Answers the room for a context that will have `length` tokens, at most `longest`.

        Nobody knows the length beforehand: `POWER` is what doubling ends with, `ORACLE` a bound.
        """
        if self is Reserve.MAXIMUM:
            return longest
        if self is Reserve.POWER:
            return min(longest, 1 << (length - 1).bit_length())
        return length


class Between(StrEnum):
    """What becomes of a session's KV between two of its calls."""

    FREE = "freed"
    """The context is released: the next call brings all its tokens again."""
    RETAIN = "retained"
    """Kept while there is room, the least recently used gives way."""
    PARK = "parked"
    """Moved to the host at once, and back with the next call."""
    HOLD = "held"
    """Kept on the device, whatever happens."""


@dataclass(frozen=True, slots=True)
class Policy:
    """One contestant."""

    name: str
    shares: bool = True
    """Whether contexts list each other's blocks."""
    reserve: Reserve | None = None
    """None takes blocks as contexts grow."""
    by_request: bool = False
    """A batch is whole requests: it ends when all of them have, and none joins meanwhile."""
    between: Between = Between.FREE

    def then(self, between: Between) -> "Policy":
        """The same contestant with another custom between calls."""
        return Policy(self.name, self.shares, self.reserve, self.by_request, between)


SHARING = Policy("paged, sharing")
NOT_SHARING = Policy("paged, not sharing", shares=False)
ORCA = tuple(Policy(f"Orca-style, {form}", shares=False, reserve=form) for form in Reserve)
FASTER_TRANSFORMER = Policy(
    "FasterTransformer-style, maximum length",
    shares=False,
    reserve=Reserve.MAXIMUM,
    by_request=True,
)
CONTESTANTS = (SHARING, NOT_SHARING, *reversed(ORCA), FASTER_TRANSFORMER)


class Extent(NamedTuple):
    """Consecutive blocks."""

    start: int
    num_blocks: int


class ContiguousPool:
    """Blocks handed out in one piece: first fit, neighbours joined when they come back.

    First fit wastes less than the buddy allocator that the paper assumes for Orca. Invariants:
    free extents are in order, apart, and never adjacent.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = [Extent(0, num_blocks)]

    @property
    def num_free(self) -> int:
        """Blocks in no reservation, whether or not one could use them."""
        return sum(extent.num_blocks for extent in self._free)

    def reserve(self, num_blocks: int) -> Extent | None:
        """Takes the first gap that is large enough; None when there is none."""
        for index, gap in enumerate(self._free):
            if gap.num_blocks >= num_blocks:
                rest = Extent(gap.start + num_blocks, gap.num_blocks - num_blocks)
                self._free[index : index + 1] = [rest] if rest.num_blocks else []
                return Extent(gap.start, num_blocks)
        return None

    def reserve_all(self, sizes: list[int]) -> tuple[Extent, ...] | None:
        """Takes a gap for each size, or none at all."""
        taken: list[Extent] = []
        for size in sizes:
            extent = self.reserve(size)
            if extent is None:
                for other in taken:
                    self.release(other)
                return None
            taken.append(extent)
        return tuple(taken)

    def release(self, extent: Extent) -> None:
        """Gives an extent back."""
        self._free.append(extent)
        self._free.sort()
        joined: list[Extent] = []
        for gap in self._free:
            if joined and joined[-1].start + joined[-1].num_blocks == gap.start:
                last = joined.pop()
                gap = Extent(last.start, last.num_blocks + gap.num_blocks)
            joined.append(gap)
        self._free = joined


def blocks_for(num_tokens: int, block_size: int) -> int:
    """Blocks that hold so many tokens."""
    return -(-num_tokens // block_size)
