"""The two transports that a client has unless it is given another: gRPC, blocking and asyncio.

It owns channels, their options, and the translation of what gRPC raises. The asyncio stack is
never run in a hidden thread: two event loops in one process are what gRPC handles worst.
"""

from typing import Any, Final

import grpc
import grpc.aio
from google.protobuf.message import Message

from agentkv import status
from agentkv.client.operation import Call
from agentkv.errors import AgentKVError, InvalidRequest
from agentkv.v1 import agentkv_pb2_grpc as pb_grpc

MAX_RECEIVE_BYTES: Final = 256 << 20
"""Log-probabilities of long contexts exceed gRPC's default of 4 MiB."""

OPTIONS: Final[tuple[tuple[str, int], ...]] = (
    ("grpc.max_receive_message_length", MAX_RECEIVE_BYTES),
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    # gRPC's waits between connects are 1 to 120 s: a server that restarts would be found late,
    # and attempts of ours in between would fail without one packet sent.
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 4_000),
    # Keeps the receive window from growing: a server is then some 100 KB ahead of a stream that
    # is read slowly, not 6 MB, and notices that it is.
    ("grpc.http2.bdp_probe", 0),
)
LOOPBACK: Final = ("127.", "localhost", "[::1]", "::1")


class GrpcTransport:
    """A blocking gRPC channel to one server.

    Args:
        address: `host:port`, or `unix:///path`.
    """

    def __init__(self, address: str) -> None:
        self._channel = grpc.insecure_channel(address, options=_options(address))
        self._stub = pb_grpc.ContextServiceStub(self._channel)
        self._is_closed = False

    def unary(self, call: Call) -> Any:
        """Sends a call and waits for its answer."""
        try:
            return self._method(call)(call.request, timeout=call.timeout)
        except grpc.RpcError as error:
            raise _failure(error, call) from error

    def stream(self, call: Call) -> "GrpcStream":
        """Sends a call, and returns at once."""
        return GrpcStream(self._method(call)(call.request, timeout=call.timeout), call)

    def close(self) -> None:
        """Closes the channel; calls that run on it end with Cancelled."""
        self._is_closed = True
        self._channel.close()

    def _method(self, call: Call) -> Any:
        _refuse_closed(self._is_closed)
        return getattr(self._stub, call.method)


class GrpcStream:
    """One streaming call of the blocking stack."""

    def __init__(self, rpc: Any, call: Call) -> None:
        self._rpc = rpc
        self._call = call

    def read(self) -> Message | None:
        """Waits for the next message; None at the end."""
        try:
            message: Message | None = next(self._rpc, None)
        except grpc.RpcError as error:
            raise _failure(error, self._call) from error
        return message

    def cancel(self) -> None:
        """Ends the call; does nothing when it has ended."""
        self._rpc.cancel()


class AsyncGrpcTransport:
    """An asyncio gRPC channel to one server.

    The channel is made by the first call, so that it belongs to the loop that calls, wherever
    the client was made.

    Args:
        address: `host:port`, or `unix:///path`.
    """

    def __init__(self, address: str) -> None:
        self._address = address
        self._channel: grpc.aio.Channel | None = None
        self._stub: Any = None
        self._is_closed = False

    async def unary(self, call: Call) -> Any:
        """Sends a call and waits for its answer. Cancelling it ends the call."""
        try:
            return await self._method(call)(call.request, timeout=call.timeout)
        except grpc.RpcError as error:
            raise _failure(error, call) from error

    def stream(self, call: Call) -> "AsyncGrpcStream":
        """Sends a call, and returns at once."""
        return AsyncGrpcStream(self._method(call)(call.request, timeout=call.timeout), call)

    async def close(self) -> None:
        """Closes the channel; calls that run on it end with Cancelled."""
        self._is_closed = True
        channel, self._channel = self._channel, None
        if channel is not None:
            await channel.close()

    def _method(self, call: Call) -> Any:
        _refuse_closed(self._is_closed)
        if self._channel is None:
            self._channel = grpc.aio.insecure_channel(
                self._address, options=_options(self._address)
            )
            self._stub = pb_grpc.ContextServiceStub(self._channel)
        return getattr(self._stub, call.method)


class AsyncGrpcStream:
    """One streaming call of the asyncio stack."""

    def __init__(self, rpc: Any, call: Call) -> None:
        self._rpc = rpc
        self._call = call

    async def read(self) -> Message | None:
        """Waits for the next message; None at the end. Cancelling it ends the call."""
        try:
            message: Any = await self._rpc.read()
        except grpc.RpcError as error:
            raise _failure(error, self._call) from error
        if message is grpc.aio.EOF:
            return None
        result: Message = message
        return result

    def cancel(self) -> None:
        """Ends the call; does nothing when it has ended."""
        self._rpc.cancel()


def _options(address: str) -> list[tuple[str, Any]]:
    # A proxy from the environment is never the way to this host itself.
    is_local = address.startswith(LOOPBACK)
    return [*OPTIONS, *([("grpc.enable_http_proxy", 0)] if is_local else [])]


def _refuse_closed(is_closed: bool) -> None:
    if is_closed:
        raise InvalidRequest("This client is closed; make another.")


def _failure(error: grpc.RpcError, call: Call) -> AgentKVError:
    """Translates what gRPC raised, and keeps the wait that the server asks for, if any."""
    failure = status.from_rpc_error(error, request_id=call.request_id)
    if isinstance(error, grpc.Call | grpc.aio.AioRpcError):
        for key, value in error.trailing_metadata() or ():
            if key == status.PUSHBACK_KEY:
                failure.metadata[key] = str(value)
    return failure
