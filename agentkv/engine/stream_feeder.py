"""Which source feeds which stream, and when; all of it on the engine's thread.

What came of a source goes to its stream as one message: at once where it ends the stream, or is the
first, else no sooner than `stream_pace` says. It knows no engine and no verb.
"""

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from agentkv.engine.engine_stream import EngineStream, Source, UpdateT
from agentkv.engine.stream_pace import least_interval
from agentkv.errors import AgentKVError


class StreamFeeder:
    """The open streams of one engine.

    Invariants: a source that was held back has an open stream, or is forgotten by the next
    `tell_held`; a stream is told once that it has ended.
    """

    def __init__(
        self, deliver: Callable[[Callable[[], None]], None], interval: float | None
    ) -> None:
        """Begins without streams.

        Args:
            deliver: Takes what is to be called on the event loop.
            interval: Least seconds between two messages of a stream; None: as many as
                `stream_pace` says.
        """
        self._deliver = deliver
        self._interval = interval
        self._streams: dict[Source[Any], EngineStream[Any]] = {}
        self._held: dict[Source[Any], None] = {}

    def begin(self, stream: EngineStream[UpdateT], begin: Callable[[], Source[UpdateT]]) -> None:
        """Makes a stream's source; a refusal ends the stream."""
        if stream.is_closed:
            return
        try:
            source = begin()
        except Exception as error:
            self._deliver(partial(stream.fail, error))
            return
        stream.source = source
        self._streams[source] = stream
        self.feed(stream)

    def feed(self, stream: EngineStream[Any]) -> None:
        """Hands a stream what its source has, as far as its reader keeps up."""
        source, has_more = stream.source, True
        while has_more and source is not None and source in self._streams and stream.may_take():
            news, error, is_last = source.take_news(), source.error, source.is_done
            if is_last:
                del self._streams[source]
            if news or is_last:
                stream.num_sent += 1
                self._deliver(partial(stream.put, news, error, is_last=is_last))
            has_more = source.has_more

    def tell(self, source: Source[Any]) -> None:
        """Feeds the stream of a source that has news, if it has one."""
        if source in self._streams:
            self.feed(self._streams[source])

    def tell_paced(self, source: Source[Any]) -> None:
        """Does the same where a message is due, and holds the news back where it is not."""
        stream = self._streams.get(source)
        if stream is None:
            return
        now = time.monotonic()
        if now < stream.due_at and not source.is_done:
            self._held[source] = None
            return
        self._held.pop(source, None)
        stream.due_at = now + self._least_interval
        self.feed(stream)

    def tell_held(self, *, is_idle: bool) -> None:
        """Feeds what was held back and is due; all of it where no news are to follow soon."""
        held, self._held = self._held, {}
        for source in held:
            if is_idle:
                self.tell(source)
            else:
                self.tell_paced(source)

    def cancel(self, stream: EngineStream[Any], end: Callable[[Any], None]) -> None:
        """Ends the source of a stream that is not read any more."""
        source = stream.source
        if source is not None and self._streams.pop(source, None) is not None:
            end(source)

    def end_all(self, failure: Callable[[], AgentKVError]) -> Iterator[Source[Any]]:
        """Ends every stream with an error, after what its source has; yields each source first."""
        for source, stream in self._streams.items():
            yield source
            self._deliver(partial(stream.put, source.take_news(), failure(), is_last=True))
        self._streams.clear()

    @property
    def _least_interval(self) -> float:
        return least_interval(len(self._streams)) if self._interval is None else self._interval
