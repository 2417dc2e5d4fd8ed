"""The seam between the SDK and a connection: everything below it can be replaced in a test.

A transport sends one call and hands back messages. It raises AgentKVError and nothing else; it
retries nothing and knows no handle.
"""

from typing import Any, Protocol

from google.protobuf.message import Message

from agentkv.client.operation import Call


class MessageStream(Protocol):
    """The answers of one streaming call, in a blocking client."""

    def read(self) -> Message | None:
        """Waits for the next message; None at the end."""
        ...

    def cancel(self) -> None:
        """Ends the call; does nothing when it has ended."""
        ...


class Transport(Protocol):
    """A connection of a blocking client; may be used by several threads at once."""

    def unary(self, call: Call) -> Any:
        """Sends a call and waits for its answer."""
        ...

    def stream(self, call: Call) -> MessageStream:
        """Sends a call, and returns at once."""
        ...

    def close(self) -> None:
        """Ends the connection and what runs on it; closing twice is fine."""
        ...


class AsyncMessageStream(Protocol):
    """The answers of one streaming call, in an asyncio client."""

    async def read(self) -> Message | None:
        """Waits for the next message; None at the end. Cancelling it ends the call."""
        ...

    def cancel(self) -> None:
        """Ends the call; does nothing when it has ended."""
        ...


class AsyncTransport(Protocol):
    """A connection of an asyncio client; belongs to one event loop."""

    async def unary(self, call: Call) -> Any:
        """Sends a call and waits for its answer. Cancelling it ends the call."""
        ...

    def stream(self, call: Call) -> AsyncMessageStream:
        """Sends a call, and returns at once."""
        ...

    async def close(self) -> None:
        """Ends the connection and what runs on it; closing twice is fine."""
        ...
