"""What a tenant may hold and use: limits, standing, and refusals with numbers.

It compares and refuses; it changes nothing. Who gives way so that a tenant keeps within its quota
is `admission`'s affair, and only contexts of the same tenant do.
"""

from dataclasses import dataclass
from typing import NamedTuple

from agentkv.config import LimitsConfig, QuotaConfig, QuotasConfig
from agentkv.core.context_tree import ContextTree
from agentkv.core.occupancy import Tenancy
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


class _Limits(NamedTuple):
    """A tenant's quota, and the smaller of it and the server's own limits."""

    quota: QuotaConfig
    max_contexts: int
    max_depth: int


class Quotas:
    """The quotas of all tenants of one pool."""

    def __init__(self, config: QuotasConfig, limits: LimitsConfig, tree: ContextTree) -> None:
        self._config = config
        self._limits = limits
        self._tree = tree
        self._known: dict[str, _Limits] = {}
        self._occupancy = tree.residency.device

    def view(self, tenant: str, num_contexts: int) -> QuotaView:
        """Shows a tenant's quotas and where it stands."""
        quota, max_contexts, max_depth = self._of(tenant)
        tenancy = self._tenancy(tenant)
        used = 0.0 if tenancy.window is None else tenancy.window.total(self._occupancy.now)
        return QuotaView(
            blocks=tenancy.num_blocks,
            max_blocks=quota.blocks,
            block_seconds=used,
            max_block_seconds=quota.block_seconds,
            window=quota.window,
            contexts=num_contexts,
            max_contexts=max_contexts,
            max_depth=max_depth,
            max_fan_out=quota.fan_out,
        )

    def require_contexts(self, tenant: str, num_held: int, count: int) -> None:
        """Makes sure that a tenant may have `count` contexts more.

        Raises:
            PoolExhausted: It may not.
        """
        limit = self._of(tenant).max_contexts
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
        quota, _, max_depth = self._of(tenant)
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
        return self._of(tenant).quota.blocks

    def is_spent(self, tenant: str) -> bool:
        """Whether a tenant has used up its block-seconds, and may take no block for a while."""
        limit = self._of(tenant).quota.block_seconds
        window = None if limit is None else self._tenancy(tenant).window
        return window is not None and window.total(self._occupancy.now) >= (limit or 0.0)

    def refuse_blocks(
        self, tenant: str, need: int, *, room: int, room_if_idle_gave_way: int, own: int
    ) -> PoolExhausted:
        """Makes the answer to a request that needs more blocks than its tenant's quota has.

        Args:
            tenant: Whose quota it is.
            need: Blocks the request needs beside those on its path. Where its path alone, held
                again, exceeds the quota, the answer counts that as needed too.
            room: Blocks of the quota beside all that is held and the request's path.
            room_if_idle_gave_way: The same if the tenant's idle contexts gave up theirs.
            own: Blocks on the request's path.
        """
        limit = self.max_blocks(tenant)
        assert limit is not None
        free, held = max(0, room), self._tree.root(tenant).held_below[Hold.KV]
        reclaimable = max(0, room_if_idle_gave_way) - free
        is_possible = own + need <= limit
        need += max(0, -room_if_idle_gave_way)
        advice = "Release or unpin contexts" if is_possible else "Use a shorter context"
        return _refusal(
            f"{need} more blocks are needed; of the quota of {limit} blocks {free} are free and "
            f"{reclaimable} reclaimable. {advice}, then try again.",
            "blocks",
            limit=limit,
            held=held,
            need=need,
            free=free,
            reclaimable=reclaimable,
            retry_after=SOON if is_possible else None,
        )

    def refuse_spent(self, tenant: str, need: int) -> PoolExhausted:
        """Makes the answer to a request for blocks of a tenant whose block-seconds are used up."""
        quota, tenancy, now = self._of(tenant).quota, self._tenancy(tenant), self._occupancy.now
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
        quota = self._of(tenant).quota
        tenancy = self._occupancy.tenancy(self._tree.root(tenant))
        if tenancy.window is None and quota.block_seconds is not None:
            tenancy.window = SlidingSum(quota.window)
        return tenancy

    def _of(self, tenant: str) -> _Limits:
        """Finds a tenant's quota, and what the server grants at most."""
        limits = self._known.get(tenant)
        if limits is None:
            quota, most = self._config.of(tenant), self._limits
            limits = self._known[tenant] = _Limits(
                quota,
                _least(most.max_contexts, quota.contexts),
                _least(most.max_depth, quota.depth),
            )
        return limits


def _least(granted: int, quota: int | None) -> int:
    return granted if quota is None else min(granted, quota)


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
