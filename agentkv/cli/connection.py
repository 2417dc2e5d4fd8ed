"""A client for one command: it asks once, and says plainly when nobody answers."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Final

import typer

from agentkv.client.client import DEFAULT_ADDRESS, Client
from agentkv.errors import Unavailable

TIMEOUT: Final = 10.0

AddressArgument = Annotated[
    str, typer.Argument(help="The server, as host:port or unix:///path.", show_default=True)
]


@contextmanager
def connected(address: str = DEFAULT_ADDRESS) -> Iterator[Client]:
    """Connects to a server while the block runs.

    Raises:
        Unavailable: Nobody answers there.
    """
    try:
        with Client(address, timeout=TIMEOUT, retry=None) as client:
            yield client
    except Unavailable as error:
        if error.reason is not None:  # a server of ours that says why
            raise
        raise Unavailable(
            f"No server answers at {address}. Start one with `agentkv serve`, or name another "
            "address."
        ) from error
