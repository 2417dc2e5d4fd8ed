"""`agentkv watch`: what happens to the contexts of a running server, a line each."""

from typing import Annotated, Final

import typer
from rich.console import Console
from rich.text import Text

from agentkv.cli.connection import AddressArgument, connected
from agentkv.cli.tree_view import short_id
from agentkv.client.client import DEFAULT_ADDRESS
from agentkv.client.values import PoolInfo, PressureLevel
from agentkv.client.watch_events import ContextChange, PressureChange, WatchEvent, WatchSnapshot

LEVEL_STYLES: Final = {
    PressureLevel.OK: "green",
    PressureLevel.SOFT: "yellow",
    PressureLevel.HARD: "bold red",
}


def watch(
    address: AddressArgument = DEFAULT_ADDRESS,
    count: Annotated[
        int | None, typer.Option(min=1, help="Events to show; all until Ctrl-C by default.")
    ] = None,
) -> None:
    """Show what happens to the contexts of a server, as it happens.

    First how things are, then a line for each change: contexts that are made, forked, grown and
    released, leases that end, KV that gives way and comes back, and the pressure on the pool.
    """
    console = Console()
    with connected(address) as client, client.watch() as events:
        try:
            for number, event in enumerate(events, start=1):
                console.print(line(event))
                if number == count:
                    return
        except KeyboardInterrupt:
            return


def line(event: WatchEvent) -> Text:
    """Writes an event for people."""
    number = (f"{event.sequence:>6}  ", "dim")
    match event:
        case WatchSnapshot():
            return Text.assemble(number, f"{len(event.contexts):,} contexts  ", _pool(event.pool))
        case PressureChange():
            return Text.assemble(number, "pressure  ", _pool(event.pool))
        case ContextChange():
            lease = event.lease.mode if event.lease.expire_time is not None else "expired"
            return Text.assemble(
                number,
                (short_id(event.context_id), "bold cyan"),
                f"  {event.kind}  {event.length:,} tokens  ",
                (str(lease), "magenta"),
            )


def _pool(pool: PoolInfo) -> Text:
    return Text.assemble(
        (str(pool.level), LEVEL_STYLES.get(pool.level, "")),
        f"  {pool.free_blocks:,} of {pool.total_blocks:,} blocks free, "
        f"{pool.reclaimable_blocks:,} reclaimable, {pool.pinned_blocks:,} pinned",
    )
