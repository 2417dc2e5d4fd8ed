"""The engine's thread, and the two ways between it and an event loop.

Commands go in and run between two steps; what became known in a step goes to the event loop in one
hand-off, while the next is computed: the loop then finds Python's lock free, and does not hold up a
step. It knows operations and streams, and no verb.
"""

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

from agentkv.engine.engine import Engine
from agentkv.engine.engine_stream import EngineStream, Source, UpdateT
from agentkv.engine.operations import Commit, Generation, Operation, Scoring
from agentkv.engine.stream_feeder import StreamFeeder
from agentkv.errors import AgentKVError, Reason, Unavailable

_Answer = TypeVar("_Answer")
_Awaited = TypeVar("_Awaited", Commit, Scoring)

_log = logging.getLogger(__name__)
_JOIN_TIMEOUT = 30.0  # seconds; a step takes far less
_MAX_SLEEP = 60.0
"""Seconds between two looks at the clock: what is due is told by a clock that may be set."""


class EngineThread:
    """Steps an engine for as long as it has work, and sleeps otherwise.

    Invariants: the engine is touched on this thread alone; what waits for an operation is told
    once, when the operation is done, or when the thread ends, be it for a fault of its own.
    """

    def __init__(self, engine: Engine, stream_interval: float | None = None) -> None:
        """Takes an engine that nobody else touches from `start` on.

        Args:
            engine: What is stepped.
            stream_interval: Least seconds between two messages of a stream; None: as many as
                `stream_pace` says.
        """
        self._engine = engine
        self._thread = threading.Thread(target=self._work, name="agentkv-engine", daemon=True)
        self._wake = threading.Condition()
        self._inbox: deque[Callable[[], None]] = deque()
        self._refusal: Callable[[], AgentKVError] | None = None
        """Makes the answer to every later call, once the thread is to end or has failed."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._has_ended = asyncio.Event()
        self._has_failed = False
        # Touched on the engine's thread only.
        self._waiters: dict[Operation, list[asyncio.Future[Operation]]] = {}
        self._deliveries: list[Callable[[], None]] = []
        self._feeder = StreamFeeder(lambda call: self._deliveries.append(call), stream_interval)

    def start(self) -> None:
        """Starts the thread; answers arrive on the event loop that runs now."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def stop(self) -> None:
        """Ends what still runs with SHUTTING_DOWN and stops the thread. Stopping twice is fine."""
        self._refuse(shutting_down)
        if self._thread.ident is not None:
            await asyncio.to_thread(self._thread.join, _JOIN_TIMEOUT)

    async def wait_ended(self) -> bool:
        """Waits until the thread has ended; returns whether it was told to."""
        await self._has_ended.wait()
        return not self._has_failed

    # -- on the event loop -------------------------------------------------------------------

    async def call(self, function: Callable[[], _Answer]) -> _Answer:
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

    def post(self, command: Callable[[], None]) -> None:
        """Runs a command between two steps, for nobody who waits; none once the thread ends."""
        with suppress(AgentKVError):
            self._post(command)

    async def complete(self, begin: Callable[[], _Awaited]) -> _Awaited:
        """Begins an operation and waits until it is done.

        Cancelling the wait cancels the operation, unless another caller waits for the same one.
        """
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
            self.settle(operation)

        self._post(command)
        try:
            await future
        except asyncio.CancelledError:
            with suppress(AgentKVError):  # the thread is about to end everything by itself
                self._post(lambda: self._abandon(begun, future))
            raise
        return begun[0]

    def stream(
        self,
        begin: Callable[[], Source[UpdateT]],
        end: Callable[[Any], None],
    ) -> EngineStream[UpdateT]:
        """Makes the stream of what `begin` starts, which happens when the stream is entered.

        Args:
            begin: Starts what the stream tells of; may refuse.
            end: Ends early what `begin` returned.
        """
        return EngineStream(
            begin=lambda stream: self._post(lambda: self._feeder.begin(stream, begin)),
            pull=lambda stream: self._post(lambda: self._feeder.feed(stream)),
            cancel=lambda stream: self._post(lambda: self._feeder.cancel(stream, end)),
        )

    def _post(self, command: Callable[[], None]) -> None:
        """Queues a command for the engine's thread.

        Raises:
            Unavailable: The engine is stopping, or has failed.
        """
        with self._wake:
            if self._refusal is not None:
                raise self._refusal()
            self._inbox.append(command)
            self._wake.notify()

    def _refuse(self, refusal: Callable[[], AgentKVError]) -> None:
        with self._wake:
            self._refusal = self._refusal or refusal
            self._wake.notify()

    # -- on the engine's thread --------------------------------------------------------------

    def _work(self) -> None:
        try:
            self._serve()
        except Exception:
            # A fault of ours: what may go wrong in a step is caught there. The bookkeeping is not
            # to be trusted any more, but those who wait are to be told.
            _log.exception("the engine failed and has ended; every call is refused from now on")
            self._has_failed = True
            self._refuse(_failed)
            for command in self._next_commands():
                with suppress(Exception):
                    command()
            self._end_all(_failed, cancel=lambda _: None)
        self._deliveries.append(self._has_ended.set)
        self._deliver()

    def _serve(self) -> None:
        while self._refusal is None:
            commands = self._next_commands()
            self._engine.advance()
            for command in commands:
                command()
            if self._engine.has_work:
                for operation in self._engine.step(self._deliver):
                    self.settle(operation)
            self._feeder.tell_held(is_idle=not self._engine.has_work)
            for watcher in self._engine.watchers():
                self.tell(watcher)
            if not self._engine.has_work:
                self._deliver()
        for command in self._next_commands():  # posted before the refusal, and not taken yet
            command()
        self._end_all(shutting_down, cancel=self._engine.cancel)

    def _next_commands(self) -> Sequence[Callable[[], None]]:
        """Takes what was posted, waiting for it if there is nothing else to do, nor due."""
        with self._wake:
            if not (self._inbox or self._refusal or self._engine.has_work):
                idle_time = self._engine.idle_time
                self._wake.wait(_MAX_SLEEP if idle_time is None else min(idle_time, _MAX_SLEEP))
            commands = list(self._inbox)
            self._inbox.clear()
        return commands

    def settle(self, operation: Operation) -> None:
        """Tells those who wait for an operation what it has for them; on the engine's thread."""
        if isinstance(operation, Generation):
            self._feeder.tell_paced(operation)
        if operation.is_done:
            for future in self._waiters.pop(operation, ()):
                deliver = (
                    partial(_resolve, future, operation)
                    if operation.error is None
                    else partial(_fail, future, operation.error)
                )
                self._deliveries.append(deliver)

    def tell(self, watcher: Source[Any]) -> None:
        """Tells who reads a watcher what it has for them; on the engine's thread."""
        self._feeder.tell(watcher)

    def _abandon(self, begun: Sequence[Operation], future: "asyncio.Future[Operation]") -> None:
        for operation in begun:
            waiters = self._waiters.get(operation, [])
            if future in waiters:
                waiters.remove(future)
                if not waiters:
                    del self._waiters[operation]
                    self._engine.cancel(operation)
            elif isinstance(operation, Commit):  # done: the answer is on its way to nobody
                self._engine.disown(operation)

    def _end_all(
        self, failure: Callable[[], AgentKVError], *, cancel: Callable[[Operation], None]
    ) -> None:
        """Ends everything under way, each context at its last committed token."""
        for source in self._feeder.end_all(failure):
            if isinstance(source, Operation):
                cancel(source)
        for waited, futures in self._waiters.items():
            cancel(waited)
            self._deliveries.extend(partial(_fail, future, failure()) for future in futures)
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


def shutting_down() -> AgentKVError:
    """Makes the answer to those whose call ends because the server does."""
    return Unavailable("The server is shutting down; try again later.", reason=Reason.SHUTTING_DOWN)


def _failed() -> AgentKVError:
    return Unavailable(
        "The engine has failed, and its contexts are gone; the server's log says why. Try again "
        "once it has been restarted.",
        reason=Reason.ENGINE_STALLED,
    )
