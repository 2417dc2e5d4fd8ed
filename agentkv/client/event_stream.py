"""What every stream of both clients can do: be iterated over, closed, and left by a `with`.

The rules are in `agentkv.client.stream_state`; what a stream is of is said by those that inherit.
"""

from collections.abc import AsyncIterator, Iterator
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

from agentkv.client.drive import AsyncDriver, Driver
from agentkv.client.stream_state import StreamState

EventT = TypeVar("EventT")
StateT = TypeVar("StateT", bound=StreamState[Any])


class EventStream(Generic[StateT, EventT]):
    """A stream of the blocking client."""

    def __init__(self, driver: Driver, state: StateT) -> None:
        self._driver = driver
        self._state = state

    def close(self) -> None:
        """Ends what still runs; closing twice is fine."""
        self._state.close()

    def __iter__(self) -> Iterator[EventT]:
        """Iterates over what comes."""
        return self

    def __next__(self) -> EventT:
        """Waits for what comes next."""
        event: EventT | None = self._driver.run(self._state.next_event())
        if event is None:
            raise StopIteration
        return event

    def __enter__(self) -> Self:
        """Returns this stream."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Closes."""
        self.close()


class AsyncEventStream(Generic[StateT, EventT]):
    """A stream of the asyncio client."""

    def __init__(self, driver: AsyncDriver, state: StateT) -> None:
        self._driver = driver
        self._state = state

    def close(self) -> None:
        """Ends what still runs; closing twice is fine."""
        self._state.close()

    def __aiter__(self) -> AsyncIterator[EventT]:
        """Iterates over what comes."""
        return self

    async def __anext__(self) -> EventT:
        """Waits for what comes next."""
        event: EventT | None = await self._driver.run(self._state.next_event())
        if event is None:
            raise StopAsyncIteration
        return event

    async def __aenter__(self) -> Self:
        """Returns this stream."""
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Closes."""
        self.close()
