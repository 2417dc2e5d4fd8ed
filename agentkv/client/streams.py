"""The streams of the blocking client: thin, the rules are in `agentkv.client.generation`."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from agentkv.client.completion import BranchFinish, Chunk, Completion, GeneratedBranch
from agentkv.client.context_group import ContextGroup
from agentkv.client.drive import Driver
from agentkv.client.event_stream import EventStream
from agentkv.client.generation import BranchesState, GenerateState

if TYPE_CHECKING:
    from agentkv.client.context_handle import ContextHandle
    from agentkv.client.handle_state import HandleState


class GenerateStream(EventStream[GenerateState, Chunk]):
    """A generation that runs: iterate over its chunks, or call `result`.

    It runs from the moment it is made, so several can run at once. Leaving the `with` before the
    end, or `close`, cancels it: the context stays at its last committed token, which may lie
    beyond the last chunk read. Iterating raises AgentKVError when the generation fails; what was
    read before then is committed.
    """

    @property
    def text_so_far(self) -> str:
        """Returns the text of the chunks read; asks for nothing."""
        return self._state.record.text

    @property
    def token_ids_so_far(self) -> tuple[int, ...]:
        """Returns the tokens of the chunks read; asks for nothing."""
        return tuple(self._state.record.token_ids)

    def result(self) -> Completion:
        """Reads to the end and returns everything.

        Raises:
            AgentKVError: The generation failed; Cancelled when it was closed early.
        """
        for _ in self:
            pass
        return self._state.result()


class BranchStream(EventStream[BranchesState, Chunk | BranchFinish]):
    """Generations on many branches that run at once: iterate over events, or call `result`.

    Events are chunks and, once for each branch, its finish; `event.branch` tells whose. It runs
    from the moment it is made. Leaving the `with` before the end, or `close`, cancels it: the
    branches live on, each at its last committed token. One that is closed before its first event
    was read may leave branches that only `Client.list` shows.
    """

    def __init__(
        self, driver: Driver, state: BranchesState, wrap: "Callable[[HandleState], ContextHandle]"
    ) -> None:
        super().__init__(driver, state)
        self._wrap = wrap
        self._contexts: ContextGroup | None = None

    @property
    def contexts(self) -> ContextGroup:
        """Returns the branches by number; empty until the first event was read."""
        if not self._contexts:
            self._contexts = ContextGroup(
                self._driver, [self._wrap(branch) for branch in self._state.branches]
            )
        return self._contexts

    def result(self) -> "list[GeneratedBranch[ContextHandle]]":
        """Reads to the end and returns every branch, failed ones included, by number.

        Raises:
            AgentKVError: The call failed as a whole; Cancelled when it was closed early.
        """
        for _ in self:
            pass
        return [
            GeneratedBranch(context, completion)
            for context, completion in zip(self.contexts, self._state.results(), strict=True)
        ]
