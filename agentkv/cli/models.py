"""`agentkv models`: which models have a short name, and what of them is on this machine."""

from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from agentkv.cli.sizes import format_bytes

if TYPE_CHECKING:
    from agentkv.model.catalog import CatalogEntry


def models() -> None:
    """List the models that have a short name, and what the next start would do for each.

    Any other model is named by a folder of safetensors, a .gguf file, or owner/name on the Hub.
    """
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
    if entry.package_file is not None:
        return f"converted at the first start, from {entry.package_file}"
    return f"downloaded at the first start, from {entry.alias.hub_id}"
