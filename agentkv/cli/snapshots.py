"""`agentkv save`, `restore` and `snapshots`: contexts that outlive their server."""

from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from agentkv.cli.connection import AddressArgument, connected
from agentkv.cli.sizes import format_bytes
from agentkv.cli.tree_view import draw
from agentkv.client.client import DEFAULT_ADDRESS
from agentkv.client.snapshot_info import SnapshotInfo

TIMEOUT = 600.0
"""Seconds for a call that moves KV."""


def save(
    context_id: Annotated[str, typer.Argument(help="Handle of the context.")],
    name: Annotated[str, typer.Argument(help="Name of the snapshot.")],
    address: AddressArgument = DEFAULT_ADDRESS,
    only_it: Annotated[
        bool, typer.Option("--only", help="The context alone, not what was forked from it.")
    ] = False,
    tokens_only: Annotated[
        bool, typer.Option("--tokens-only", help="No KV: small, and computed when it is used.")
    ] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace a snapshot of this name.")
    ] = False,
) -> None:
    """Save a context, and all that was forked from it, on the server's disk."""
    with connected(address) as client:
        context = client.attach(context_id)
        info = context.save(
            name,
            recursive=not only_it,
            with_kv=not tokens_only,
            overwrite=overwrite,
            timeout=TIMEOUT,
        )
        Console().print(Text(f"Saved {describe(info)}."))


def restore(
    name: Annotated[str, typer.Argument(help="Name of the snapshot.")],
    address: AddressArgument = DEFAULT_ADDRESS,
    tokens_only: Annotated[
        bool, typer.Option("--tokens-only", help="Leave its KV alone; it is computed when used.")
    ] = False,
) -> None:
    """Make the contexts of a snapshot anew, and show their handles."""
    console = Console()
    with connected(address) as client:
        restored = client.restore(name, with_kv=not tokens_only, timeout=TIMEOUT)
        for handle in restored:
            handle.detach()  # or leaving the client would release them
        console.print(draw(address, client.server_info(), [item.info for item in restored]))
        for saved_id, handle in zip(restored.saved_ids, restored, strict=True):
            console.print(Text(f"{saved_id} is now {handle.id}"), soft_wrap=True)
        if restored.kv_refusal:
            console.print(Text(f"Its KV is computed again: {restored.kv_refusal}."))


def snapshots(
    address: AddressArgument = DEFAULT_ADDRESS,
    delete: Annotated[
        str | None, typer.Option(metavar="NAME", help="Delete this one instead.")
    ] = None,
) -> None:
    """List the snapshots on the server's disk, or delete one."""
    with connected(address) as client:
        if delete is not None:
            client.delete_snapshot(delete)
            return
        table = Table.grid(padding=(0, 2))
        for info in client.list_snapshots():
            table.add_row(f"{info.create_time:%Y-%m-%d %H:%M}", Text(describe(info)))
        Console().print(table)


def describe(info: SnapshotInfo) -> str:
    """Writes a snapshot for people."""
    return (
        f"{info.name}: {info.num_contexts:,} contexts, {info.num_tokens:,} distinct tokens, "
        f"{info.num_kv_tokens:,} with KV, {format_bytes(info.num_bytes)}, {info.model_name}"
    )
