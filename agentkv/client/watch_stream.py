"""The watches of both clients: thin, the rules are in `agentkv.client.watch_state`."""

from collections.abc import AsyncIterator, Iterator
from types import TracebackType
from typing import Self

from agentkv.client.drive import AsyncDriver, Driver
from agentkv.client.watch_events import WatchEvent
from agentkv.client.watch_state import WatchState


class WatchStream:
    """What happens to the caller's contexts, as it happens: iterate over it.

    The first event is a snapshot, and so is one that comes after the watcher lagged far behind.
    Leaving the `with`, or `close`, ends the watch. Iterating raises AgentKVError when it fails.
    """

    def __init__(self, driver: Driver, state: WatchState) -> None:
        self._driver = driver
        self._state = state

    def close(self) -> None:
        """Ends the watch; closing twice is fine."""
        self._state.close()

    def __iter__(self) -> Iterator[WatchEvent]:
        """Iterates over the events."""
        return self

    def __next__(self) -> WatchEvent:
        """Waits for the next event."""
        event = self._driver.run(self._state.next_event())
        if event is None:
            raise StopIteration
        return event

    def __enter__(self) -> Self:
        """Returns this watch."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Closes."""
        self.close()


class AsyncWatchStream:
    """What happens to the caller's contexts, as it happens: iterate over it.

    The first event is a snapshot, and so is one that comes after the watcher lagged far behind.
    Leaving the `async with`, or `close`, ends the watch. Iterating raises AgentKVError when it
    fails.
    """

    def __init__(self, driver: AsyncDriver, state: WatchState) -> None:
        self._driver = driver
        self._state = state

    def close(self) -> None:
        """Ends the watch; closing twice is fine."""
        self._state.close()

    def __aiter__(self) -> AsyncIterator[WatchEvent]:
        """Iterates over the events."""
        return self

    async def __anext__(self) -> WatchEvent:
        """Waits for the next event."""
        event = await self._driver.run(self._state.next_event())
        if event is None:
            raise StopAsyncIteration
        return event

    async def __aenter__(self) -> Self:
        """Returns this watch."""
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Closes."""
        self.close()
