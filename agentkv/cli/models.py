"""`agentkv models`: which models have a short name, what of them is here, and what is supported."""

from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from agentkv.cli.sizes import format_bytes

if TYPE_CHECKING:
    from agentkv.model.catalog import CatalogEntry


def models(
    supported: Annotated[
        bool,
        typer.Option("--supported", help="List the architectures that were proven or are refused."),
    ] = False,
) -> None:
    """List the models that have a short name, and what the next start would do for each.

    Any other model is named by a folder of safetensors, a .gguf file, or owner/name on the Hub.
    """
    if supported:
        _print_supported(Console())
        return
    # Imported here: it needs libraries of the server, which a client's machine need not have.
    from agentkv.model.catalog import list_models

    table = Table(box=None, header_style="bold cyan", pad_edge=False)
    for name in ("Name", "Model", "Licence", "On this machine"):
        table.add_column(name, overflow="fold")
    for entry in list_models():
        alias = entry.alias
        table.add_row(alias.name, alias.description, alias.license, describe(entry))
    Console().print(table)


def describe(entry: "CatalogEntry") -> str:
    """Says what there is of a model, or what a start would do to get it."""
    if entry.path is not None:
        return f"ready, {format_bytes(entry.size_bytes)} in {entry.path}"
    if entry.packaged is not None:
        return f"converted at the first start, from {entry.packaged.parts[0]}"
    return f"downloaded at the first start, from {entry.alias.hub_id}"


def _print_supported(console: Console) -> None:
    """Prints the proven architectures, then the refused ones by reason."""
    # Imported here: a client's machine has no model, and the other command is for it too.
    from agentkv.model.architectures import PROVEN, REFUSED

    console.print("Architectures, as config.json names them (model_type).", style="bold")
    console.print(f"\n[bold cyan]Proven[/] ({len(PROVEN)}): {', '.join(PROVEN)}")
    for why, names in REFUSED.items():
        console.print(f"\n[bold cyan]Refused[/] ({len(names)}), {why}: {', '.join(names)}")
    console.print(
        "\n[bold cyan]Others[/] are tried: at load, the golden check compares forked branches with "
        "the model's own attention, and refuses what differs. So do particular models of a proven "
        "architecture, for instance with dynamic or longrope rotary embeddings."
    )
