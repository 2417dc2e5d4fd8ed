"""`agentkv tree`: the contexts of a running server, as the tree they are."""

import time
from collections.abc import Callable
from typing import Annotated

import typer
from rich.console import Console, RenderableType
from rich.live import Live

from agentkv.cli.connection import AddressArgument, connected
from agentkv.cli.tree_view import draw
from agentkv.client.client import DEFAULT_ADDRESS


def tree(
    address: AddressArgument = DEFAULT_ADDRESS,
    is_watching: Annotated[
        bool, typer.Option("--watch", "-w", help="Draw it again and again, until Ctrl-C.")
    ] = False,
    interval: Annotated[float, typer.Option(min=0.05, help="Seconds between two drawings.")] = 0.5,
) -> None:
    """Draw the living contexts of a server as trees.

    Each line is a context: the end of its handle, its length in tokens, where it was forked, the
    blocks it holds **alone** and those it **shares**, and what is special about it. The last line
    sums up: a sharing ratio of 5 says that five times the blocks would be needed without forks.
    """
    console = Console()
    with connected(address) as client:

        def look() -> RenderableType:
            return draw(address, client.server_info(), list(client.list()))

        if is_watching:
            watch(look, console, interval)
        else:
            console.print(look())


def watch(
    look: Callable[[], RenderableType],
    console: Console,
    interval: float,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Draws in place until it is interrupted."""
    with Live(look(), console=console, auto_refresh=False, vertical_overflow="visible") as live:
        try:
            while True:
                sleep(interval)
                live.update(look(), refresh=True)
        except KeyboardInterrupt:
            return
