"""What was used, as numbers that add up: by one context, a tree of them, or a tenant.

It knows no block and no clock; `agentkv.core.ledger` says when something is charged to whom.
"""

from dataclasses import dataclass, fields

from agentkv.core.block_move import Tier
from agentkv.core.occupancy import Reading


@dataclass(slots=True)
class Bill:
    """Tokens, copies and block-seconds. A running account of the ledger, a copy anywhere else."""

    computed_tokens: int = 0
    """Rows the model ran."""
    reused_tokens: int = 0
    """Tokens whose KV a context found at its first use, from prefix cache or by being forked."""
    generated_tokens: int = 0
    """Tokens sampled and committed."""
    recomputed_tokens: int = 0
    """Part of `computed_tokens` whose KV had been there before: it gave way, or its logits did."""
    block_copies: int = 0
    """Blocks copied on write."""
    block_seconds: tuple[float, ...] = (0.0,) * len(Tier)
    """By tier; a block that n contexts hold costs each 1/n per second."""
    saved_block_seconds: float = 0.0
    """What the contexts would have used beyond that if nothing had been shared; all tiers."""

    def charge(self, tier: Tier, used: Reading) -> None:
        """Adds block-seconds."""
        sums = list(self.block_seconds)
        sums[tier] += used.share
        self.block_seconds = tuple(sums)
        self.saved_block_seconds += used.alone - used.share

    def add(self, other: "Bill") -> None:
        """Adds all of another bill."""
        pairs = zip(self.block_seconds, other.block_seconds, strict=True)
        self.block_seconds = tuple(mine + its for mine, its in pairs)
        for name in _ADDED:
            setattr(self, name, getattr(self, name) + getattr(other, name))


_ADDED = tuple(item.name for item in fields(Bill) if item.name != "block_seconds")
