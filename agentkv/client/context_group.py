"""Several handles made by one call, released by one call."""

from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Self, TypeVar, overload

from agentkv.client.drive import AsyncDriver, Driver
from agentkv.client.handle_base import HandleBase
from agentkv.client.leaving import not_hiding
from agentkv.client.operation import Operation
from agentkv.client.values import Released

if TYPE_CHECKING:
    from agentkv.client.async_context_handle import AsyncContextHandle
    from agentkv.client.context_handle import ContextHandle

HandleT = TypeVar("HandleT", bound=HandleBase)


class GroupBase(Sequence[HandleT]):
    """A fixed sequence of handles, by branch number."""

    def __init__(self, handles: Sequence[HandleT]) -> None:
        self._handles = tuple(handles)

    @overload
    def __getitem__(self, index: int) -> HandleT: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[HandleT]: ...
    def __getitem__(self, index: int | slice) -> HandleT | Sequence[HandleT]:
        """Returns the handle of one branch, or those of some."""
        return self._handles[index]

    def __len__(self) -> int:
        """Counts the branches."""
        return len(self._handles)

    def __repr__(self) -> str:
        """Shows the handles."""
        return f"{type(self).__name__}({list(self._handles)})"

    def _release(self) -> Operation[Released]:
        """Releases what is owned here and below, the newest first, in one call where it fits."""
        states = [handle._state for handle in reversed(self._handles)]
        nodes = [node for state in states for node in state.lineage.owned()]
        return (yield from states[0].session.leave(nodes)) if states else Released()


class ContextGroup(GroupBase["ContextHandle"]):
    """Branches of one fork: a sequence, and a `with` that releases them."""

    def __init__(self, driver: Driver, handles: "Sequence[ContextHandle]") -> None:
        super().__init__(handles)
        self._driver = driver

    def release(self) -> Released:
        """Releases every branch that is not detached, and every branch owned below them."""
        return self._driver.run(self._release())

    def __enter__(self) -> Self:
        """Returns this group."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Releases."""
        with not_hiding(error):
            self.release()


class AsyncContextGroup(GroupBase["AsyncContextHandle"]):
    """Branches of one fork: a sequence, and an `async with` that releases them."""

    def __init__(self, driver: AsyncDriver, handles: "Sequence[AsyncContextHandle]") -> None:
        super().__init__(handles)
        self._driver = driver

    async def release(self) -> Released:
        """Releases every branch that is not detached, and every branch owned below them."""
        return await self._driver.run(self._release())

    async def __aenter__(self) -> Self:
        """Returns this group."""
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Releases."""
        with not_hiding(error):
            await self.release()
