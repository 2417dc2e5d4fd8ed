"""A running stream without input or output: opening, repeating, reading ahead, closing.

It owns when a stream may be opened again (before its first message, never after) and what an
early end leaves behind. Subclasses say what is sent and what a message holds; the blocking and
the asyncio stream only pull events out.
"""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

from google.protobuf.message import Message

from agentkv.client.operation import Call, Operation, Read
from agentkv.client.retry import Attempts
from agentkv.errors import AgentKVError, Cancelled, InternalError

EventT = TypeVar("EventT")

OpenStream = Callable[[Call], Any]
"""Sends a streaming call and returns at once; a transport's `stream`."""


class StreamState(ABC, Generic[EventT]):
    """The state behind one stream.

    Args:
        open_stream: Opens the call.
        attempts: The logical call this is.
    """

    method: str

    def __init__(self, open_stream: OpenStream, attempts: Attempts) -> None:
        self._open_stream = open_stream
        self._attempts = attempts
        self._rpc: Any = None
        self._events: deque[EventT] = deque()
        self._has_message = False
        self._is_over = False
        self._failure: AgentKVError | None = None

    @property
    @abstractmethod
    def is_finished(self) -> bool:
        """Whether every branch has ended."""

    @abstractmethod
    def request(self) -> Message:
        """Builds the request as it must be now."""

    @abstractmethod
    def absorb(self, message: Any) -> Iterator[EventT]:
        """Takes a message into account and yields what it tells."""

    @abstractmethod
    def abandon(self) -> None:
        """Notes that the server may have committed more than was read."""

    def prepare(self, attempts: Attempts) -> Operation[None]:
        """Does what must precede the first opening."""
        del attempts
        yield from ()

    def reopen(self, attempts: Attempts) -> None:
        """Begins once more, after an end that is none to the caller."""
        self._attempts, self._rpc, self._has_message = attempts, None, False
        self._is_over, self._failure = False, None

    def start(self) -> None:
        """Sends the call without waiting for anything."""
        self._open(self._attempts.remaining())

    def next_event(self) -> Operation[EventT | None]:
        """Returns the next event; None once the stream is over."""
        while not self._events and not self._is_over:
            try:
                message = yield from self._read()
            except AgentKVError as error:
                self._is_over, self._failure = True, error
                raise
            except BaseException:  # an interrupt or a cancellation: nobody will read on
                self.close()
                raise
            if message is None:
                self._end()
            else:
                self._has_message = True
                self._events.extend(self.absorb(message))
        return self._events.popleft() if self._events else None

    def close(self) -> None:
        """Ends the call where it is; closing twice is fine."""
        if self._is_over:
            return
        self._is_over = True
        self._events.clear()
        if self._rpc is not None:
            self._rpc.cancel()
            if not self.is_finished:
                self.abandon()

    def check_complete(self) -> None:
        """Checks that the stream has run to its end.

        Raises:
            AgentKVError: What ended it early; Cancelled when that was `close`.
        """
        if self._failure is not None:
            raise self._failure
        if not self.is_finished:
            raise Cancelled("The stream was closed before its end.")

    def _read(self) -> Operation[Message | None]:
        if self._has_message:
            message: Message | None = yield Read(self._rpc)
            return message
        if self._rpc is None:
            yield from self.prepare(self._attempts)
        return (yield from self._attempts.run(self._read_first))

    def _read_first(self, remaining: float) -> Operation[Message | None]:
        if self._rpc is None:
            self._open(remaining)
        try:
            message: Message | None = yield Read(self._rpc)
        except AgentKVError:
            self._rpc = None
            raise
        return message

    def _open(self, remaining: float) -> None:
        self._rpc = self._open_stream(Call(self.method, self.request(), remaining))

    def _end(self) -> None:
        self._is_over = True
        if not self.is_finished:
            self._failure = InternalError("The server ended the stream before its finish.")
            raise self._failure
