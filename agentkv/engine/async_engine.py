"""The engine's thread, bridged to asyncio.

Every verb runs on the engine's thread, between two steps. After each step everything that became
known goes to the event loop in one hand-off. It decides nothing: what a verb means is `Engine`'s.
"""

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TypeVar

from agentkv.config import LimitsConfig
from agentkv.core.context_store import ContextPage
from agentkv.core.views import ContextView
from agentkv.engine.engine import Engine
from agentkv.engine.generation_stream import GenerationStream
from agentkv.engine.operations import Commit, Generation, Operation, Scoring
from agentkv.engine.outputs import (
    Committed,
    ContextTokens,
    EngineView,
    Forked,
    ModelFacts,
    Released,
    Scores,
    Truncated,
)
from agentkv.engine.tokenizer import Tokenizer
from agentkv.errors import AgentKVError, Reason, Unavailable
from agentkv.sampling_params import SamplingParams

_Answer = TypeVar("_Answer")
_Awaited = TypeVar("_Awaited", Commit, Scoring)

_JOIN_TIMEOUT = 30.0  # seconds; a step takes far less


class AsyncEngine:
    """An `Engine` for callers on one event loop.

    Cancelling an awaited call cancels the operation, unless another caller awaits the same one:
    each context then stays at its last committed token.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._thread = threading.Thread(target=self._work, name="agentkv-engine", daemon=True)
        self._wake = threading.Condition()
        self._inbox: deque[Callable[[], None]] = deque()
        self._is_stopping = False
        self._loop: asyncio.AbstractEventLoop | None = None
        # Touched on the engine's thread only.
        self._waiters: dict[Operation, list[asyncio.Future[Operation]]] = {}
        self._streams: dict[Generation, GenerationStream] = {}
        self._deliveries: list[Callable[[], None]] = []

    @property
    def limits(self) -> LimitsConfig:
        """What one tenant or one call may ask for."""
        return self._engine.limits

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer; it may be used on any thread."""
        return self._engine.tokenizer

    @property
    def facts(self) -> ModelFacts:
        """What a client may want to know of the model."""
        return self._engine.facts

    async def start(self) -> None:
        """Starts the engine's thread; answers arrive on the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def stop(self) -> None:
        """Ends what still runs with SHUTTING_DOWN and stops the thread. Stopping twice is fine."""
        with self._wake:
            self._is_stopping = True
            self._wake.notify()
        if self._thread.ident is not None:
            await asyncio.to_thread(self._thread.join, _JOIN_TIMEOUT)

    # -- verbs, as on Engine -----------------------------------------------------------------

    async def create(
        self,
        tenant: str,
        token_ids: Sequence[int],
        *,
        pinned: bool = False,
        labels: Mapping[str, str] | None = None,
        request_id: str | None = None,
    ) -> Committed:
        """Makes a context of these tokens; see `Engine.create`."""
        operation = await self._complete(
            lambda: self._engine.create(
                tenant, token_ids, pinned=pinned, labels=labels, request_id=request_id
            )
        )
        return operation.answer

    async def fork(
        self,
        tenant: str,
        context_id: str,
        *,
        count: int = 1,
        at: int | None = None,
        labels: Mapping[str, str] | None = None,
        request_id: str | None = None,
    ) -> Forked:
        """Makes contexts that share this one's tokens; see `Engine.fork`."""
        return await self._call(
            lambda: Forked(
                self._engine.fork(
                    tenant, context_id, count=count, at=at, labels=labels, request_id=request_id
                ),
                self._engine.pool_view(),
            )
        )

    async def extend(
        self,
        tenant: str,
        context_id: str,
        token_ids: Sequence[int],
        *,
        expected_length: int | None = None,
        logprobs: bool = False,
    ) -> Committed:
        """Appends given tokens, all or none; see `Engine.extend`."""
        operation = await self._complete(
            lambda: self._engine.extend(
                tenant, context_id, token_ids, expected_length=expected_length, logprobs=logprobs
            )
        )
        return operation.answer

    def generate(
        self,
        tenant: str,
        context_id: str,
        params: SamplingParams,
        *,
        expected_length: int | None = None,
    ) -> GenerationStream:
        """Samples and commits tokens; see `Engine.generate`. Starts when the stream is entered."""
        return self._stream(
            lambda: self._engine.generate(
                tenant, context_id, params, expected_length=expected_length
            )
        )

    def generate_branches(
        self,
        tenant: str,
        context_id: str,
        count: int,
        params: SamplingParams,
        *,
        at: int | None = None,
        labels: Mapping[str, str] | None = None,
    ) -> GenerationStream:
        """Forks and generates; see `Engine.generate_branches`. Starts when entered."""
        return self._stream(
            lambda: self._engine.generate_branches(
                tenant, context_id, count, params, at=at, labels=labels
            )
        )

    async def score(
        self, tenant: str, context_id: str, continuations: Sequence[Sequence[int]]
    ) -> Scores:
        """Computes log-probabilities of continuations; see `Engine.score`."""
        operation = await self._complete(
            lambda: self._engine.score(tenant, context_id, continuations)
        )
        return operation.answer

    async def truncate(
        self, tenant: str, context_id: str, length: int, *, expected_length: int | None = None
    ) -> Truncated:
        """Takes a context back to its first tokens; see `Engine.truncate`."""
        return await self._call(
            lambda: Truncated(
                self._engine.truncate(tenant, context_id, length, expected_length=expected_length),
                self._engine.pool_view(),
            )
        )

    async def release(
        self,
        tenant: str,
        context_ids: Sequence[str],
        *,
        recursive: bool = False,
        allow_missing: bool = False,
    ) -> Released:
        """Forgets contexts; see `Engine.release`."""
        return await self._call(
            lambda: self._release(tenant, context_ids, recursive, allow_missing)
        )

    async def get(self, tenant: str, context_id: str) -> ContextView:
        """Describes one context."""
        return await self._call(lambda: self._engine.get(tenant, context_id))

    async def tokens(
        self, tenant: str, context_id: str, start: int = 0, *, limit: int | None = None
    ) -> ContextTokens:
        """Describes one context and reads its tokens; see `Engine.tokens`."""
        return await self._call(
            lambda: ContextTokens(
                self._engine.get(tenant, context_id),
                self._engine.tokens(tenant, context_id, start, limit=limit),
            )
        )

    async def list(
        self,
        tenant: str,
        *,
        root_id: str | None = None,
        page_size: int = 100,
        page_token: str = "",
    ) -> ContextPage:
        """Lists a tenant's contexts, a page at a time."""
        return await self._call(
            lambda: self._engine.list(
                tenant, root_id=root_id, page_size=page_size, page_token=page_token
            )
        )

    async def view(self) -> EngineView:
        """Describes the engine."""
        return await self._call(self._engine.view)

    # -- on the event loop -------------------------------------------------------------------

    async def _call(self, function: Callable[[], _Answer]) -> _Answer:
        """Runs a function on the engine's thread, between steps."""
        future: asyncio.Future[_Answer] = asyncio.get_running_loop().create_future()

        def command() -> None:
            try:
                answer = function()
            except Exception as error:
                self._deliveries.append(partial(_fail, future, error))
            else:
                self._deliveries.append(partial(_resolve, future, answer))

        self._post(command)
        return await future

    async def _complete(self, begin: Callable[[], _Awaited]) -> _Awaited:
        """Begins an operation and waits until it is done."""
        future: asyncio.Future[Operation] = asyncio.get_running_loop().create_future()
        begun: list[_Awaited] = []

        def command() -> None:
            if future.cancelled():
                return
            try:
                operation = begin()
            except Exception as error:
                self._deliveries.append(partial(_fail, future, error))
                return
            begun.append(operation)
            self._waiters.setdefault(operation, []).append(future)
            self._settle(operation)

        self._post(command)
        try:
            await future
        except asyncio.CancelledError:
            self._post(lambda: self._abandon(begun, future))
            raise
        return begun[0]

    def _stream(self, begin: Callable[[], Generation]) -> GenerationStream:
        return GenerationStream(
            begin=lambda stream: self._post(lambda: self._begin_stream(stream, begin)),
            pull=lambda stream: self._post(lambda: self._feed(stream)),
            cancel=lambda stream: self._post(lambda: self._cancel_stream(stream)),
        )

    def _post(self, command: Callable[[], None]) -> None:
        """Queues a command for the engine's thread.

        Raises:
            Unavailable: The engine is stopping.
        """
        with self._wake:
            if self._is_stopping:
                raise _shutting_down()
            self._inbox.append(command)
            self._wake.notify()

    # -- on the engine's thread --------------------------------------------------------------

    def _work(self) -> None:
        while self._take_commands():
            if self._engine.has_work:
                for operation in self._engine.step():
                    self._settle(operation)
            self._deliver()
        self._end_all()
        self._deliver()

    def _take_commands(self) -> bool:
        """Runs what was posted, waiting for it if there is nothing else to do; False to stop."""
        with self._wake:
            while not (self._inbox or self._is_stopping or self._engine.has_work):
                self._wake.wait()
            if self._is_stopping:
                return False
            commands = list(self._inbox)
            self._inbox.clear()
        for command in commands:
            command()
        return True

    def _settle(self, operation: Operation) -> None:
        """Tells those who wait for an operation what it has for them."""
        if isinstance(operation, Generation) and operation in self._streams:
            self._feed(self._streams[operation])
        if operation.is_done:
            for future in self._waiters.pop(operation, ()):
                deliver = (
                    partial(_resolve, future, operation)
                    if operation.error is None
                    else partial(_fail, future, operation.error)
                )
                self._deliveries.append(deliver)

    def _abandon(self, begun: Sequence[Operation], future: "asyncio.Future[Operation]") -> None:
        for operation in begun:
            waiters = self._waiters.get(operation, [])
            if future in waiters:
                waiters.remove(future)
                if not waiters:
                    del self._waiters[operation]
                    self._engine.cancel(operation)

    def _begin_stream(self, stream: GenerationStream, begin: Callable[[], Generation]) -> None:
        if stream.is_closed:
            return
        try:
            operation = begin()
        except Exception as error:
            self._deliveries.append(partial(stream.fail, error))
            return
        stream.operation = operation
        self._streams[operation] = stream
        self._settle(operation)

    def _feed(self, stream: GenerationStream) -> None:
        operation = stream.operation
        if operation is None or operation not in self._streams or not stream.may_take():
            return
        news, error = operation.take_news(), operation.error
        is_last = operation.is_done
        if is_last:
            del self._streams[operation]
        if news or is_last:
            stream.num_sent += 1
            self._deliveries.append(partial(stream.put, news, error, is_last=is_last))

    def _cancel_stream(self, stream: GenerationStream) -> None:
        operation = stream.operation
        if operation is not None and self._streams.pop(operation, None) is not None:
            self._engine.cancel(operation)

    def _release(
        self,
        tenant: str,
        context_ids: Sequence[str],
        recursive: bool,
        allow_missing: bool,
    ) -> Released:
        released, ended = self._engine.release(
            tenant, context_ids, recursive=recursive, allow_missing=allow_missing
        )
        for operation in ended:
            self._settle(operation)
        return released

    def _end_all(self) -> None:
        """Ends everything under way, each context at its last committed token."""
        error = _shutting_down()
        for operation, stream in self._streams.items():
            self._engine.cancel(operation)
            put = partial(stream.put, operation.take_news(), error, is_last=True)
            self._deliveries.append(put)
        for waited, futures in self._waiters.items():
            self._engine.cancel(waited)
            self._deliveries.extend(partial(_fail, future, error) for future in futures)
        self._streams.clear()
        self._waiters.clear()

    def _deliver(self) -> None:
        """Hands everything over to the event loop in one call."""
        deliveries, self._deliveries = self._deliveries, []
        if not deliveries:
            return
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(_run_all, deliveries)
        except RuntimeError:  # the loop is closed: nobody is left to hear
            assert self._loop.is_closed()


def _run_all(deliveries: Sequence[Callable[[], None]]) -> None:
    for deliver in deliveries:
        deliver()


def _resolve(future: "asyncio.Future[_Answer]", answer: _Answer) -> None:
    if not future.done():
        future.set_result(answer)


def _fail(future: "asyncio.Future[_Answer]", error: Exception) -> None:
    if not future.done():
        future.set_exception(error)


def _shutting_down() -> AgentKVError:
    return Unavailable("The server is shutting down; try again later.", reason=Reason.SHUTTING_DOWN)
