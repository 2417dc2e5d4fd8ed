"""`agentkv usage`: what the contexts of a running server have used, and the quotas."""

from typing import Annotated

import typer
from rich.console import Console

from agentkv.cli.connection import AddressArgument, connected
from agentkv.cli.tables import facts_table
from agentkv.client.client import DEFAULT_ADDRESS
from agentkv.client.usage_info import Bill, QuotaInfo, TierUsage, UsageInfo


def usage(
    address: AddressArgument = DEFAULT_ADDRESS,
    root_id: Annotated[
        str | None,
        typer.Option("--tree", help="Handle of a created context: its tree alone."),
    ] = None,
) -> None:
    """Show the tokens and the memory over time that your contexts have used, and your quotas.

    A **block-second** is one block for one second. A block that n contexts share costs each 1/n.
    """
    with connected(address) as client:
        Console().print(facts_table(describe(client.get_usage(root_id))))


def describe(info: UsageInfo) -> dict[str, str]:
    """Writes usage for people."""
    return {
        "Contexts": f"{info.num_contexts:,} now",
        **_bill(info.bill),
        **_quotas(info.quotas),
        **{f"All tenants, {item.tier}": _tier(item) for item in info.tiers},
    }


def _bill(bill: Bill) -> dict[str, str]:
    return {
        "Tokens": (
            f"{bill.computed_tokens:,} computed, of them {bill.recomputed_tokens:,} again; "
            f"{bill.reused_tokens:,} reused, {bill.generated_tokens:,} generated"
        ),
        "Block-seconds": (
            f"{bill.device_block_seconds:,.1f} on the device, {bill.host_block_seconds:,.1f} on "
            f"the host, {bill.disk_block_seconds:,.1f} on disk; sharing saved "
            f"{bill.saved_block_seconds:,.1f}"
        ),
        "Block copies": f"{bill.block_copies:,}",
    }


def _quotas(quotas: QuotaInfo) -> dict[str, str]:
    seconds = "no limit"
    if quotas.max_block_seconds is not None:
        seconds = (
            f"{quotas.block_seconds:,.1f} of {quotas.max_block_seconds:,.1f} in {quotas.window:g} s"
        )
    return {
        "Quota of blocks": f"{quotas.blocks:,} of {_limit(quotas.max_blocks)}",
        "Quota of block-seconds": seconds,
        "Quota of contexts": f"{quotas.contexts:,} of {quotas.max_contexts:,}",
        "Quota of depth": f"{quotas.max_depth:,}",
        "Quota of fan-out": _limit(quotas.max_fan_out),
    }


def _limit(limit: int | None) -> str:
    return "no limit" if limit is None else f"{limit:,}"


def _tier(item: TierUsage) -> str:
    return (
        f"{item.taken_block_seconds:,.1f} block-seconds: {item.held_block_seconds:,.1f} held, "
        f"{item.unheld_block_seconds:,.1f} cached"
    )
