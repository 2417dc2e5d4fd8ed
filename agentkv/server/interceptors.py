"""What happens around every call of the service: errors become statuses, time is bounded.

It owns what a caller may learn of a failure, and how long a call may take. It knows no method
and no message; health checks and reflection pass untouched.
"""

import asyncio
import logging
import uuid
from abc import abstractmethod
from collections.abc import Awaitable, Callable
from typing import Any, Final

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from agentkv import status
from agentkv.errors import (
    AgentKVError,
    Cancelled,
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
)
from agentkv.server.tenant import Rpc
from agentkv.v1 import agentkv_pb2 as pb

PREFIX: Final = f"/{pb.DESCRIPTOR.services_by_name['ContextService'].full_name}/"

logger = logging.getLogger(__name__)

Behaviour = Callable[[Any, Rpc], Awaitable[Any]]


class Undecodable:
    """Stands for a request whose bytes are no message of its type."""


class ServiceInterceptor(grpc.aio.ServerInterceptor):
    """Wraps the behaviour of every method of the service; subclasses say in what."""

    @abstractmethod
    async def around(self, behaviour: Behaviour, request: Any, rpc: Rpc, method: str) -> Any:
        """Calls `behaviour(request, rpc)` and returns its answer, None from a stream."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Wraps the handler that the rest of the chain found."""
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None or not method.startswith(PREFIX):
            return handler
        behaviour: Any = handler.unary_stream if handler.response_streaming else handler.unary_unary

        async def wrapped(request: Any, rpc: Rpc) -> Any:
            return await self.around(behaviour, request, rpc, method)

        make: Any = (
            grpc.unary_stream_rpc_method_handler
            if handler.response_streaming
            else grpc.unary_unary_rpc_method_handler
        )
        return make(
            wrapped,
            self.deserializer(handler.request_deserializer),
            handler.response_serializer,
        )

    def deserializer(self, inner: Any) -> Any:
        """Returns what turns bytes into a request."""
        return inner


class OpenCalls(ServiceInterceptor):
    """Counts the calls of the service that are open, health watchers and the like left out."""

    def __init__(self) -> None:
        self._num_open = 0
        self._none_open = asyncio.Event()
        self._none_open.set()

    async def around(self, behaviour: Behaviour, request: Any, rpc: Rpc, method: str) -> Any:
        """Counts the call while its behaviour runs."""
        self._num_open += 1
        self._none_open.clear()
        try:
            return await behaviour(request, rpc)
        finally:
            self._num_open -= 1
            if self._num_open == 0:
                self._none_open.set()

    async def wait_none(self) -> None:
        """Waits until no call is open."""
        await self._none_open.wait()


class ErrorInterceptor(ServiceInterceptor):
    """Ends every failed call with a status of the closed table, and never with a cause of ours.

    Outermost but for the counting, so that nothing passes it. gRPC alone would send any
    exception's text to the client, and would leave the client waiting for ever when a handler
    raises a CancelledError that is not the call's own.

    Args:
        patience: Seconds that a reader has to take the status before its handler ends without it.
    """

    def __init__(self, *, patience: float) -> None:
        self._patience = patience

    async def around(self, behaviour: Behaviour, request: Any, rpc: Rpc, method: str) -> Any:
        """Translates what the behaviour raises."""
        try:
            if isinstance(request, Undecodable):
                raise InvalidRequest("The request is no valid message: is its text UTF-8?")
            return await behaviour(request, rpc)
        except AgentKVError as error:
            failure = error
        except grpc.aio.AbortError:
            raise
        except asyncio.CancelledError:
            task = asyncio.current_task()
            assert task is not None
            if task.cancelling():
                raise  # the call itself is cancelled: nobody waits for an answer
            failure = Cancelled("The operation was cancelled by the server.")
        except Exception:
            log_id = uuid.uuid4().hex
            logger.exception("%s failed; log id %s", method, log_id)
            failure = InternalError(f"The server failed; its log says why under id {log_id}.")
        # Outside the handler above, so that no traceback keeps the request alive.
        return await self._abort(rpc, failure)

    async def _abort(self, rpc: Rpc, failure: AgentKVError) -> None:
        """Ends a call with a status, and does not wait for ever for a reader to take it."""
        try:
            async with asyncio.timeout(self._patience):
                await rpc.abort(
                    status.code_of(failure),
                    status.to_status(failure).message,
                    status.trailing_metadata(failure),
                )
        except TimeoutError:
            # The status is with gRPC, which delivers it once the reader reads on. The handler need
            # not stay for that: it would count among the open calls.
            raise asyncio.CancelledError from None

    def deserializer(self, inner: Any) -> Any:
        """Lets undecodable bytes through to `around`: gRPC alone would answer UNKNOWN."""

        def decode(raw: bytes) -> Any:
            try:
                return inner(raw)
            except DecodeError:
                return Undecodable()

        return decode


class DeadlineInterceptor(ServiceInterceptor):
    """Gives every call a deadline, and cuts those beyond the longest.

    Args:
        default: Seconds for a call that names no deadline.
        longest: Seconds for any call.
    """

    def __init__(self, *, default: float, longest: float) -> None:
        self._default = default
        self._longest = longest

    async def around(self, behaviour: Behaviour, request: Any, rpc: Rpc, method: str) -> Any:
        """Calls the behaviour within the time that is left.

        Raises:
            DeadlineExceeded: The time is over; at once when it was over before.
        """
        asked: float | None = rpc.time_remaining()
        granted = self._default if asked is None else min(asked, self._longest)
        if granted <= 0:
            raise DeadlineExceeded(f"The deadline of {method} was over before it began.")
        try:
            async with asyncio.timeout(granted) as scope:
                return await behaviour(request, rpc)
        except TimeoutError:
            if not scope.expired():
                raise
            raise DeadlineExceeded(
                f"{method} took longer than the {granted:g} s it had; what it committed stays."
            ) from None
