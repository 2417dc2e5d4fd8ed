"""What was used, and how much may be, as messages."""

from types import MappingProxyType
from typing import Final

from agentkv.core.bill import Bill
from agentkv.core.block_move import Tier
from agentkv.core.quotas import QuotaView
from agentkv.core.usage_view import UsageView
from agentkv.v1 import agentkv_pb2 as pb

TIERS: Final = MappingProxyType(
    {
        Tier.DEVICE: pb.TIER_DEVICE,
        Tier.HOST: pb.TIER_HOST,
        Tier.DISK: pb.TIER_DISK,
    }
)


def usage_view(view: UsageView) -> pb.GetUsageResponse:
    """Translates the answer of GetUsage."""
    return pb.GetUsageResponse(
        bill=bill(view.bill),
        num_contexts=view.num_contexts,
        quotas=quotas(view.quotas),
        tiers=[
            pb.TierUsage(
                tier=TIERS[item.tier],
                taken_block_seconds=item.taken,
                held_block_seconds=item.held,
                unheld_block_seconds=item.unheld,
            )
            for item in view.tiers
        ],
    )


def bill(value: Bill) -> pb.Bill:
    """Translates what was used."""
    return pb.Bill(
        computed_tokens=value.computed_tokens,
        reused_tokens=value.reused_tokens,
        generated_tokens=value.generated_tokens,
        recomputed_tokens=value.recomputed_tokens,
        block_copies=value.block_copies,
        device_block_seconds=value.block_seconds[Tier.DEVICE],
        host_block_seconds=value.block_seconds[Tier.HOST],
        disk_block_seconds=value.block_seconds[Tier.DISK],
        saved_block_seconds=value.saved_block_seconds,
    )


def quotas(view: QuotaView) -> pb.Quotas:
    """Translates a tenant's quotas."""
    return pb.Quotas(
        blocks=view.blocks,
        max_blocks=view.max_blocks,
        block_seconds=view.block_seconds,
        max_block_seconds=view.max_block_seconds,
        window=view.window,
        contexts=view.contexts,
        max_contexts=view.max_contexts,
        max_depth=view.max_depth,
        max_fan_out=view.max_fan_out,
    )
