"""From a config and an engine to a running server, and back to a stopped one.

It owns the listening port, health, reflection and the order of shutdown. It knows no method of
the service and builds no engine: whoever serves passes one in.
"""

import asyncio
import logging
import signal
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from agentkv.config import ServerConfig
from agentkv.errors import AgentKVError, InternalError, InvalidRequest
from agentkv.server.interceptors import DeadlineInterceptor, ErrorInterceptor, OpenCalls
from agentkv.server.served_engine import ServedEngine
from agentkv.server.service import ContextService
from agentkv.v1 import agentkv_pb2 as pb
from agentkv.v1 import agentkv_pb2_grpc as pb_grpc

SERVICE_NAME: Final = pb.DESCRIPTOR.services_by_name["ContextService"].full_name
MAX_SEND_BYTES: Final = 16 << 20
LAST_WORDS: Final = 0.5
"""Seconds that calls have to deliver their status once the engine has stopped."""

logger = logging.getLogger(__name__)


class Server:
    """One gRPC server in front of one engine, which it starts and stops.

    Use as `async with Server(engine, config) as server`, or `start` and `stop` by hand. All of
    it belongs to one event loop.
    """

    def __init__(self, engine: ServedEngine, config: ServerConfig) -> None:
        self._engine = engine
        self._config = config
        self._health = health.aio.HealthServicer()
        self._open_calls = OpenCalls()
        self._grpc: grpc.aio.Server | None = None
        self._port = config.port

    @property
    def address(self) -> str:
        """Where clients reach it, `host:port`, with the real port once it has started."""
        return _join(self._config.host, self._port)

    async def start(self) -> None:
        """Starts the engine, listens, and reports SERVING.

        Raises:
            InvalidRequest: The address is taken, or not one of this host's.
        """
        _probe(self._config)
        server = self._build()
        try:
            self._port = server.add_insecure_port(self.address)
        except RuntimeError as error:  # taken between the probe and now
            raise _cannot_listen(self.address, str(error)) from None
        await self._engine.start()
        await server.start()
        self._grpc = server
        await self._health.set(SERVICE_NAME, health_pb2.HealthCheckResponse.SERVING)
        logger.info("Serving on %s.", self.address)

    async def stop(self) -> None:
        """Drains and stops within a little more than the grace. Stopping twice is fine.

        Health turns NOT_SERVING first, then new calls are refused while open ones run on. Those
        that still run when the grace is over end with SHUTTING_DOWN, each context at its last
        committed token.
        """
        server, self._grpc = self._grpc, None
        if server is None:
            return
        await self._health.enter_graceful_shutdown()
        logger.info("Stopping: open calls have %g s.", self._config.grace)
        # Waits on our own calls: a health watcher stays open for as long as the server lets it.
        stopping = asyncio.create_task(server.stop(self._config.grace + 2 * LAST_WORDS))
        await asyncio.sleep(0)  # from here on new calls are refused
        with suppress(AgentKVError):  # an engine that failed has ended them already
            await self._engine.end_watches()
        with suppress(TimeoutError):
            async with asyncio.timeout(self._config.grace):
                await self._open_calls.wait_none()
        await self._engine.stop()
        await server.stop(LAST_WORDS)
        await stopping
        logger.info("Stopped.")

    async def __aenter__(self) -> "Server":
        """Starts."""
        await self.start()
        return self

    async def __aexit__(self, *exception: object) -> None:
        """Stops."""
        await self.stop()

    def _build(self) -> grpc.aio.Server:
        config = self._config
        server = grpc.aio.server(
            maximum_concurrent_rpcs=config.max_concurrent_rpcs,
            interceptors=[  # the first is the outermost
                self._open_calls,
                ErrorInterceptor(patience=config.stall_timeout),
                DeadlineInterceptor(default=config.default_deadline, longest=config.max_deadline),
            ],
            options=_options(config),
        )
        pb_grpc.add_ContextServiceServicer_to_server(ContextService(self._engine, config), server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        if config.is_loopback:  # the contract is public, but scanners need not find it easily
            names = (SERVICE_NAME, health.SERVICE_NAME, reflection.SERVICE_NAME)
            reflection.enable_server_reflection(names, server)
        return server


async def serve(
    engine: ServedEngine,
    config: ServerConfig,
    *,
    on_ready: Callable[[str], None] = lambda address: None,
) -> None:
    """Serves until SIGINT or SIGTERM, then stops gracefully. A second signal ends the process.

    An engine that fails by itself ends the serving too, so that a supervisor can begin anew.

    Args:
        engine: The engine to start, serve and stop.
        config: Where to listen, and what to grant.
        on_ready: Called with the address once calls are accepted.

    Raises:
        InvalidRequest: The address is taken, or not one of this host's.
        InternalError: The engine failed.
    """
    loop = asyncio.get_running_loop()
    told_to_stop = asyncio.Event()
    signals = (signal.SIGINT, signal.SIGTERM)
    async with Server(engine, config) as server:
        for number in signals:
            loop.add_signal_handler(number, told_to_stop.set)
        try:
            on_ready(server.address)
            has_failed = await _engine_fails_first(engine, told_to_stop)
        finally:
            for number in signals:
                loop.remove_signal_handler(number)
    if has_failed:
        raise InternalError("The engine failed and serves no more; the log says why.")


async def _engine_fails_first(engine: ServedEngine, told_to_stop: asyncio.Event) -> bool:
    """Waits for an order to stop or the engine's failure; returns whether it was the latter."""
    order = asyncio.create_task(told_to_stop.wait())
    end = asyncio.create_task(engine.wait_ended())
    try:
        await asyncio.wait((order, end), return_when=asyncio.FIRST_COMPLETED)
        return end.done() and not end.result()
    finally:
        order.cancel()
        end.cancel()


def _options(config: ServerConfig) -> list[tuple[str, Any]]:
    return [
        ("grpc.so_reuseport", 0),  # or a second server would share the port in silence
        ("grpc.max_receive_message_length", config.max_message_bytes),
        ("grpc.max_send_message_length", MAX_SEND_BYTES),
        ("grpc.max_concurrent_streams", 1024),
        ("grpc.keepalive_time_ms", 30_000),
        ("grpc.keepalive_timeout_ms", 10_000),
        ("grpc.keepalive_permit_without_calls", 1),
        # The default of 5 minutes answers a client that pings during a long prefill with GOAWAY.
        ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ]


def _probe(config: ServerConfig) -> None:
    """Binds the port once: gRPC would report a taken one in several lines of its own."""
    try:
        family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
        socket.create_server((config.host, config.port), family=family).close()
    except OSError as error:
        raise _cannot_listen(
            _join(config.host, config.port), error.strerror or str(error)
        ) from None


def _cannot_listen(address: str, why: str) -> InvalidRequest:
    return InvalidRequest(f"Cannot listen on {address}: {why}. Choose another host or port.")


def _join(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
