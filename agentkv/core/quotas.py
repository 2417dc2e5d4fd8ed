"""What a tenant may hold and use: limits, standing, and refusals with numbers.

It compares and refuses; it changes nothing. Who gives way so that a tenant keeps within its quota
is `admission`'s affair, and only contexts of the same tenant do.
"""

from dataclasses import dataclass

from agentkv.config import LimitsConfig, QuotaConfig, QuotasConfig
from agentkv.core.context_tree import ContextTree
from agentkv.core.occupancy import Tenancy, Tier
from agentkv.core.segment import Hold
from agentkv.core.sliding_sum import SlidingSum
from agentkv.errors import PoolExhausted, Reason

SOON = 1.0
"""Seconds after which blocks may have been given back by other requests of the tenant."""


@dataclass(frozen=True, slots=True)
class QuotaView:
    """A tenant's quotas and where it stands; a limit of None is none."""

    blocks: int
    """Device blocks its contexts hold."""
    max_blocks: int | None
    block_seconds: float
    """Device block-seconds used in the window; counted only where there is a limit."""
    max_block_seconds: float | None
    window: float
    """Seconds over which block-seconds count."""
    contexts: int
    max_contexts: int
    max_depth: int
    max_fan_out: int | None


class Quotas:
    """The quotas of all tenants of one pool."""

    def __init__(self, config: QuotasConfig, limits: LimitsConfig, tree: ContextTree) -> None:
        self._config = config
        self._limits = limits
        self._tree = tree
        self._occupancy = tree.residency.occupancies[Tier.DEVICE]

    def view(self, tenant: str, num_contexts: int) -> QuotaView:
        """Shows a tenant's quotas and where it stands."""
        quota = self._config.of(tenant)
        tenancy = self._tenancy(tenant)
        used = 0.0 if tenancy.window is None else tenancy.window.total(self._occupancy.now)
        return QuotaView(
            blocks=tenancy.num_blocks,
            max_blocks=quota.blocks,
            block_seconds=used,
            max_block_seconds=quota.block_seconds,
            window=quota.window,
            contexts=num_contexts,
            max_contexts=self._max_contexts(quota),
            max_depth=self._max_depth(quota),
            max_fan_out=quota.fan_out,
        )

    def require_contexts(self, tenant: str, num_held: int, count: int) -> None:
        """Makes sure that a tenant may have `count` contexts more.

        Raises:
            PoolExhausted: It may not.
        """
        limit = self._max_contexts(self._config.of(tenant))
        if num_held + count > limit:
            raise _refusal(
                f"{count} more contexts would exceed the quota of {limit}; {num_held} are held. "
                "Release some first.",
                "contexts",
                limit=limit,
                held=num_held,
                need=count,
            )

    def require_branches(self, tenant: str, depth: int, num_children: int, count: int) -> None:
        """Makes sure that a context at a depth in its tree may have `count` children more.

        Raises:
            PoolExhausted: It may not.
        """
        quota = self._config.of(tenant)
        max_depth = self._max_depth(quota)
        if depth >= max_depth:
            raise _refusal(
                f"A context may descend from at most {max_depth} forks.",
                "depth",
                limit=max_depth,
                held=depth,
                need=1,
            )
        if quota.fan_out is not None and num_children + count > quota.fan_out:
            raise _refusal(
                f"A context may have at most {quota.fan_out} living children; this one has "
                f"{num_children}, and {count} more are wanted. Release some first.",
                "fan_out",
                limit=quota.fan_out,
                held=num_children,
                need=count,
            )

    def max_blocks(self, tenant: str) -> int | None:
        """Says how many device blocks a tenant's contexts may hold."""
        return self._config.of(tenant).blocks

    def is_spent(self, tenant: str) -> bool:
        """Whether a tenant has used up its block-seconds, and may take no block for a while."""
        limit = self._config.of(tenant).block_seconds
        window = None if limit is None else self._tenancy(tenant).window
        return window is not None and window.total(self._occupancy.now) >= (limit or 0.0)

    def refuse_blocks(self, tenant: str, need: int, is_possible: bool) -> PoolExhausted:
        """Makes the answer to a request that needs more blocks than its tenant's quota has.

        Args:
            tenant: Whose quota it is.
            need: Blocks the request needs.
            is_possible: Whether it would fit if the tenant held nothing else.
        """
        limit = self.max_blocks(tenant)
        assert limit is not None
        held = self._tree.root(tenant).held_below
        free = max(0, limit - held[Hold.KV])
        reclaimable = held[Hold.KV] - held[Hold.FIRM]
        advice = "Release or unpin contexts" if is_possible else "Use a shorter context"
        return _refusal(
            f"{need} more blocks are needed; of the quota of {limit} blocks {free} are free and "
            f"{reclaimable} reclaimable. {advice}, then try again.",
            "blocks",
            limit=limit,
            held=held[Hold.KV],
            need=need,
            free=free,
            reclaimable=reclaimable,
            retry_after=SOON if is_possible else None,
        )

    def refuse_spent(self, tenant: str, need: int) -> PoolExhausted:
        """Makes the answer to a request for blocks of a tenant whose block-seconds are used up."""
        quota, tenancy, now = self._config.of(tenant), self._tenancy(tenant), self._occupancy.now
        assert quota.block_seconds is not None and tenancy.window is not None
        used = tenancy.window.total(now)
        wait = tenancy.window.wait_until_below(quota.block_seconds, now, tenancy.num_blocks)
        held = self._tree.root(tenant).held_below
        advice = (
            f"Try again in {wait:.0f} s, or release contexts."
            if wait is not None
            else "What is held uses the quota up as fast as it frees: release contexts."
        )
        return _refusal(
            f"{used:.0f} block-seconds were used in the last {quota.window:g} s, of a quota of "
            f"{quota.block_seconds:g}. {advice}",
            "block_seconds",
            limit=quota.block_seconds,
            held=used,
            need=need,
            reclaimable=held[Hold.KV] - held[Hold.FIRM],
            retry_after=wait,
        )

    def _tenancy(self, tenant: str) -> Tenancy:
        quota = self._config.of(tenant)
        tenancy = self._occupancy.tenancy(self._tree.root(tenant))
        if tenancy.window is None and quota.block_seconds is not None:
            tenancy.window = SlidingSum(quota.window)
        return tenancy

    def _max_contexts(self, quota: QuotaConfig) -> int:
        most = self._limits.max_contexts
        return most if quota.contexts is None else min(most, quota.contexts)

    def _max_depth(self, quota: QuotaConfig) -> int:
        most = self._limits.max_depth
        return most if quota.depth is None else min(most, quota.depth)


def _refusal(
    message: str,
    quota: str,
    *,
    limit: float,
    held: float,
    need: int,
    free: float | None = None,
    reclaimable: int = 0,
    retry_after: float | None = None,
) -> PoolExhausted:
    left = max(0, limit - held) if free is None else free
    return PoolExhausted(
        message,
        reason=Reason.TENANT_QUOTA,
        metadata={
            "quota": quota,
            "limit": f"{limit:.17g}",
            "held": f"{held:.17g}",
            "need": need,
            "free": f"{left:.17g}",
            "reclaimable": reclaimable,
        },
        retry_after=retry_after,
    )
