"""How facts look in a terminal: names left, values right of them."""

from collections.abc import Mapping

from rich.table import Table
from rich.text import Text


def facts_table(facts: Mapping[str, str]) -> Table:
    """Lays out facts, one a line."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold cyan")
    table.add_column(overflow="fold")
    for name, value in facts.items():
        table.add_row(name, Text(value))  # Text: brackets in a value are no markup
    return table
