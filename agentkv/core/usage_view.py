"""What observers see of bills, pool and quotas: frozen values that cross layers."""

from dataclasses import dataclass

from agentkv.core.bill import Bill
from agentkv.core.block_move import Tier
from agentkv.core.quotas import QuotaView


@dataclass(frozen=True, slots=True)
class TierView:
    """One tier since start, in block-seconds: taken = held + unheld."""

    tier: Tier
    taken: float
    held: float
    """Charged to contexts."""
    unheld: float
    """Charged to nobody: prefix cache, and KV that gave way and was not yet needed for others."""


@dataclass(frozen=True, slots=True)
class UsageView:
    """A bill as of one moment, and the pool it came from."""

    bill: Bill
    num_contexts: int
    """Living contexts it covers."""
    tiers: tuple[TierView, ...]
    """All tenants together, of each tier there is."""
    quotas: QuotaView
    """The tenant's own."""
