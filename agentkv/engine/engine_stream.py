"""One stream of updates as seen from the event loop: what came, in order, until it ends.

The reader sets the pace. While it lags, what follows is kept at the source, in bounded memory: in
a generation, tokens of many steps become one chunk, and a watcher starts over with a snapshot.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Generic, Protocol, Self, TypeVar

from agentkv.errors import AgentKVError

UpdateT = TypeVar("UpdateT")
UpdateT_co = TypeVar("UpdateT_co", covariant=True)

_MAX_UNREAD = 64
"""Messages under way before the engine holds back."""


class Source(Protocol[UpdateT_co]):
    """Where the updates of a stream come from; touched on the engine's thread only."""

    @property
    def is_done(self) -> bool:
        """Whether no update will follow those that are there."""
        ...

    @property
    def has_more(self) -> bool:
        """Whether updates are left after some were taken."""
        ...

    @property
    def error(self) -> AgentKVError | None:
        """What ended it, if it did not end well."""
        ...

    def take_news(self) -> tuple[UpdateT_co, ...]:
        """Hands over what came since the last call, or a part of it."""
        ...


class EngineStream(Generic[UpdateT]):
    """An asynchronous iterator of updates, one tuple per engine step that had news.

    Use as `async with stream: async for updates in stream`. Leaving the block cancels what still
    runs; each context then stays at its last committed token. The error that refused or ended
    the call is raised by the iteration, after the updates before it.

    Invariant: `num_sent` and `due_at` are written by the engine's thread alone, `_num_read` by the
    event loop's.
    """

    def __init__(
        self,
        *,
        begin: Callable[["EngineStream[UpdateT]"], None],
        pull: Callable[["EngineStream[UpdateT]"], None],
        cancel: Callable[["EngineStream[UpdateT]"], None],
    ) -> None:
        self.source: Source[UpdateT] | None = None
        """Set on the engine's thread once the call was accepted."""
        self.num_sent = 0
        self.due_at = 0.0
        """Time, by `time.monotonic`, before which tokens alone make no message."""
        self.is_closed = False
        self._begin = begin
        self._pull = pull
        self._cancel = cancel
        self._is_begun = self._is_complete = self._has_lagged = False
        self._num_read = 0
        self._unread: deque[tuple[UpdateT, ...]] = deque()
        self._error: Exception | None = None
        self._news = asyncio.Event()

    async def __aenter__(self) -> Self:
        """Begins the call."""
        self._start()
        return self

    async def __aexit__(self, *exception: object) -> None:
        """Closes the stream."""
        self.close()

    def __aiter__(self) -> Self:
        """Iterates over the steps that had news."""
        return self

    async def __anext__(self) -> tuple[UpdateT, ...]:
        """Waits for the next step with news.

        Raises:
            AgentKVError: The call was refused, or a single generation ended in an error.
        """
        self._start()
        while not self._unread:
            if self._is_complete or self.is_closed:
                raise self._error or StopAsyncIteration
            if self._has_lagged:
                self._has_lagged = False
                self._pull(self)
            self._news.clear()
            await self._news.wait()
        self._num_read += 1
        return self._unread.popleft()

    def close(self) -> None:
        """Cancels what still runs. At once, without waiting; closing twice is fine."""
        if self.is_closed:
            return
        self.is_closed = True
        self._news.set()
        if self._is_begun and not self._is_complete:
            try:
                self._cancel(self)
            except AgentKVError:  # the engine is stopping, and ends everything by itself
                self._is_complete = True

    def may_take(self) -> bool:
        """Whether the reader keeps up; called on the engine's thread before each hand-over."""
        if self.num_sent - self._num_read < _MAX_UNREAD:
            return True
        # Set first, then look again: a reader that emptied the buffer in between did not see it.
        self._has_lagged = True
        return self.num_sent - self._num_read < _MAX_UNREAD

    def put(self, updates: tuple[UpdateT, ...], error: Exception | None, *, is_last: bool) -> None:
        """Takes in what a step brought; called on the event loop."""
        if updates:
            self._unread.append(updates)
        else:
            self._num_read += 1
        if is_last:
            self._error, self._is_complete = error, True
        self._news.set()

    def fail(self, error: Exception) -> None:
        """Ends the stream of a call that was refused; called on the event loop."""
        self.put((), error, is_last=True)

    def _start(self) -> None:
        if not self._is_begun:
            self._is_begun = True
            self._begin(self)
