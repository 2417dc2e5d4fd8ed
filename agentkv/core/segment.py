"""A run of tokens on one path of the context tree, and the blocks that hold their KV.

A segment knows its neighbours in the tree and nothing of contexts but their number.

    block_size = 4         S0  tokens 0..7    blocks [7, 3]
                           ├─ S1  tokens 8..9    blocks [9]       two slots of block 9 are used
                           └─ S2  tokens 8..11   blocks [5]       8 and 9 were copied from block 9

    A child starts where its parent ends, so the tokens of a path are its segments' tokens in
    order, and position p lies in the (p // block_size)-th block of the path. Where a fork cut a
    segment inside a block, both parts list that block.

    KV that left the device is listed as `away`, block by block, and begins where the device's ends:

        start ......... num_computed ......... num_kept ......... end
          blocks: on the device     away: host or disk     tokens only
"""

from array import array
from enum import IntEnum

from agentkv.core.block_move import LOWER_TIERS, Place, Tier


class Hold(IntEnum):
    """How firmly something is kept; each level includes those below it."""

    TOKENS = 0
    """Tokens only: the KV may go and is recomputed at the next use."""
    KV = 1
    """KV too, while there is room: an idle context."""
    FIRM = 2
    """KV until the request that runs on it ends."""
    PINNED = 3
    """KV whatever the pressure."""


class Segment:
    """Tokens [start, end) of a path; those in [start, num_computed) have their KV in `blocks`.

    Invariants (`check_tree`): `blocks` covers exactly [start, num_computed), from the block that
    holds `start` on; `away` covers exactly [num_computed, num_kept), from the block that holds
    `num_computed` on, and no block of it is in `blocks`; a token has KV in some tier only if all
    tokens before it on the path have; a sealed segment does not grow.
    """

    __slots__ = (
        "_block_ids",
        "account",
        "away",
        "blocks",
        "children",
        "held_below",
        "holds",
        "id",
        "index",
        "index_key",
        "kept_end",
        "last_used",
        "num_away_children",
        "num_computed",
        "num_contexts",
        "num_kv_children",
        "parent",
        "root",
        "start",
        "tokens",
    )

    def __init__(self, id: int, start: int, tokens: "array[int]", parent: "Segment | None") -> None:
        self.id = id
        self.start = start
        self.tokens = tokens
        self.parent = parent
        self.root: Segment = self if parent is None else parent.root
        self.account: Segment = self if parent is None else parent.account
        """The root at which its tenant's blocks are counted, whatever the adapter."""
        self.children: dict[Segment, None] = {}
        self.blocks: list[int] = []
        self.num_computed = start
        self.away: list[Place] = []
        """Where KV is that left the device; whole blocks were carried, so that each holds what
        its positions below `num_kept` need, those before `start` included."""
        self.kept_end = start
        """Position up to which `away` reaches, while there is any."""
        self.num_contexts = 0
        """Contexts whose tail this is."""
        self.holds = [0] * len(Hold)
        """Per level: contexts here, and children that are held, at that level or above."""
        self.held_below: list[int] = [0] * len(Hold) if parent is None else parent.held_below
        """Per level: blocks held below this root; one list for all its segments."""
        self.num_kv_children = 0
        """Children that have KV on the device."""
        self.num_away_children: dict[Tier, int] = dict.fromkeys(LOWER_TIERS, 0)
        """Children that have KV in a lower tier."""
        self.last_used = 0
        """Logical time at which a context last left or used it; orders eviction."""
        self.index: dict[bytes, dict[Segment, None]] = {}
        """Children by their tokens up to the next block boundary, once those have KV."""
        self.index_key: bytes | None = None
        """Where the parent's index lists this segment."""
        self._block_ids: tuple[int, ...] | None = None

    @property
    def end(self) -> int:
        """Position after the last token."""
        return self.start + len(self.tokens)

    @property
    def is_root(self) -> bool:
        """Whether this is the empty segment that all paths of a tenant and adapter begin with."""
        return self.parent is None

    @property
    def is_sealed(self) -> bool:
        """Whether something counts on this segment ending where it does."""
        return self.is_root or bool(self.children) or self.num_contexts > 1

    @property
    def is_computed(self) -> bool:
        """Whether every token has its KV on the device."""
        return self.num_computed == self.end

    @property
    def num_kept(self) -> int:
        """Position up to which there is KV in some tier."""
        return self.kept_end if self.away else self.num_computed

    @property
    def block_ids(self) -> tuple[int, ...]:
        """Its part of the block table; derived, and cached until the blocks change."""
        if self._block_ids is None:
            self._block_ids = tuple(self.blocks)
        return self._block_ids

    def set_blocks(self, blocks: list[int]) -> None:
        """Replaces the list; counting is the caller's affair."""
        self.blocks = blocks
        self._block_ids = None

    def num_owned(self, block_size: int) -> int:
        """Blocks whose topmost listing this is: a block cut by a fork belongs to the upper part."""
        return len(self.blocks) - (1 if self.blocks and self.start % block_size else 0)

    def __repr__(self) -> str:
        return f"<Segment {self.id} [{self.start}, {self.end}) blocks {self.blocks}>"
