"""A watch without input or output: which messages make an event, and when it is opened again."""

from collections.abc import Iterator

from agentkv.client import replies
from agentkv.client.operation import Operation
from agentkv.client.session import Session
from agentkv.client.stream_state import OpenStream, StreamState
from agentkv.client.values import ContextInfo
from agentkv.client.watch_events import PressureChange, WatchEvent, WatchSnapshot
from agentkv.errors import DeadlineExceeded
from agentkv.v1 import agentkv_pb2 as pb


class WatchState(StreamState[WatchEvent]):
    """Watches the caller's contexts; starts at once.

    Without a time of the caller's it goes on for ever: a server ends every call some day, and the
    watch is opened again then, which begins with a fresh snapshot.
    """

    method = "Watch"

    def __init__(self, session: Session, open_stream: OpenStream, timeout: float | None) -> None:
        super().__init__(open_stream, session.attempts(timeout))
        self._session = session
        self._timeout = timeout
        self._pieces: list[ContextInfo] = []
        self.start()

    @property
    def is_finished(self) -> bool:
        """Whether it came to its own end, which no watch has."""
        return False

    def request(self) -> pb.WatchRequest:
        """Returns the request."""
        return pb.WatchRequest()

    def next_event(self) -> Operation[WatchEvent | None]:
        """Returns the next event; None once the watch was closed."""
        while True:
            try:
                return (yield from super().next_event())
            except DeadlineExceeded:
                if self._timeout is not None:
                    raise
                self.reopen(self._session.attempts(None))

    def absorb(self, message: pb.WatchResponse) -> Iterator[WatchEvent]:
        """Takes in what the server told at once; a snapshot in pieces becomes one event."""
        for event in message.events:
            match event.WhichOneof("update"):
                case "snapshot":
                    yield from self._snapshot(event)
                case "change":
                    yield replies.change(event)
                case "pressure":
                    yield PressureChange(event.sequence, replies.pool(event.pressure))

    def abandon(self) -> None:
        """Notes nothing: watching changes nothing."""

    def _snapshot(self, event: pb.WatchEvent) -> Iterator[WatchSnapshot]:
        if event.snapshot.is_first:
            self._pieces = []
        self._pieces.extend(replies.context(context) for context in event.snapshot.contexts)
        if event.snapshot.is_last:
            pool = replies.pool(event.snapshot.pool)
            yield WatchSnapshot(event.sequence, tuple(self._pieces), pool)
            self._pieces = []
