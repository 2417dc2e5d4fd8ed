"""Start, health, reflection and the order of shutdown."""

import asyncio
import os
import signal
import socket
from typing import Any

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from server.fake_engine import FakeEngine
from server.harness import failure_of, run, serving

from agentkv import errors
from agentkv.config import ServerConfig
from agentkv.errors import InvalidRequest, Reason
from agentkv.server.main import SERVICE_NAME, Server, serve
from agentkv.v1 import agentkv_pb2 as pb
from agentkv.v1 import agentkv_pb2_grpc as pb_grpc

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


def test_health_and_reflection_answer() -> None:
    """Catches a server that load balancers and grpcurl cannot see into."""

    async def scenario() -> None:
        async with serving() as served:
            health: Any = health_pb2_grpc.HealthStub(served.channel)
            for name in ("", SERVICE_NAME):
                answer = await health.Check(health_pb2.HealthCheckRequest(service=name))
                assert answer.status == SERVING
            reflection: Any = reflection_pb2_grpc.ServerReflectionStub(served.channel)
            call = reflection.ServerReflectionInfo()
            await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
            answer = await call.read()
            await call.done_writing()
            names = {service.name for service in answer.list_services_response.service}
            assert SERVICE_NAME in names

    run(scenario())


def test_stopping_turns_health_first_and_lets_open_calls_end() -> None:
    """Catches a shutdown that cuts a running generation, or waits for a health watcher."""

    async def scenario() -> None:
        async with serving(grace=20.0) as served:
            engine = served.engine
            engine.steps_before_hold = 2
            root = (await served.stub.Create(pb.CreateRequest(text="a"))).context.id
            health: Any = health_pb2_grpc.HealthStub(served.channel)
            watch = health.Watch(health_pb2.HealthCheckRequest(service=SERVICE_NAME))
            assert (await watch.read()).status == SERVING
            call = served.stub.Generate(
                pb.GenerateRequest(context_id=root, sampling=pb.SamplingOptions(max_tokens=9))
            )
            messages = aiter(call)
            await anext(messages)
            await engine.waiting.wait()
            stopping = asyncio.create_task(served.server.stop())
            assert (await watch.read()).status == NOT_SERVING
            engine.gate.set()
            rest = [message async for message in messages]
            assert rest[-1].HasField("finish")
            await stopping
            assert engine.calls[-1] == "stop"
            assert isinstance(
                await failure_of(served.stub.Create(pb.CreateRequest(text="a"))),
                errors.Unavailable,
            )

    run(scenario())


def test_what_outlives_the_grace_ends_with_shutting_down() -> None:
    """Catches a stop that waits for ever, or a stream cut without a reason to retry."""

    async def scenario() -> None:
        async with serving(grace=0.05) as served:
            served.engine.steps_before_hold = 2
            root = (await served.stub.Create(pb.CreateRequest(text="a"))).context.id
            call = served.stub.Generate(pb.GenerateRequest(context_id=root))
            await call.read()
            await served.engine.waiting.wait()
            stopping = asyncio.create_task(served.server.stop())
            error = await failure_of(call)
            assert isinstance(error, errors.Unavailable)
            assert error.reason is Reason.SHUTTING_DOWN
            await stopping
            await served.server.stop()  # once more: nothing happens

    run(scenario())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_serve_ends_on_a_signal(number: signal.Signals) -> None:
    """Catches a server that dies on SIGTERM, or leaves its handlers behind."""

    async def scenario() -> None:
        engine = FakeEngine()
        addresses: list[str] = []

        def ready(address: str) -> None:
            addresses.append(address)
            os.kill(os.getpid(), number)

        before = signal.getsignal(number)
        await serve(engine, ServerConfig(port=0, grace=0.0), on_ready=ready)
        assert engine.calls == ["start", "end_watches", "stop"]
        assert signal.getsignal(number) in (before, signal.default_int_handler, signal.SIG_DFL)
        port = int(addresses[0].rpartition(":")[2])
        assert port != 0

    run(scenario())


def test_serve_ends_when_its_engine_fails() -> None:
    """Catches a process that lives on with a dead engine, and no supervisor to know of it."""

    async def scenario() -> None:
        engine = FakeEngine()

        def ready(address: str) -> None:
            engine.ended.set()

        with pytest.raises(errors.InternalError):
            await serve(engine, ServerConfig(port=0, grace=0.0), on_ready=ready)
        assert engine.calls == ["start", "end_watches", "stop"]

    run(scenario())


def test_a_taken_port_fails_with_one_clear_line(capfd: pytest.CaptureFixture[str]) -> None:
    """Catches two servers that share a port in silence, or a failure in ten lines of C++."""

    async def scenario() -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
            engine = FakeEngine()
            with pytest.raises(InvalidRequest) as caught:
                await Server(engine, ServerConfig(port=port)).start()
            assert f"127.0.0.1:{port}" in caught.value.message
            assert engine.calls == []

    run(scenario())
    assert capfd.readouterr().err == ""


def test_more_calls_than_allowed_are_refused() -> None:
    """Catches a server without its outer fuse."""

    async def scenario() -> None:
        async with serving(max_concurrent_rpcs=1) as served:
            served.engine.gate.clear()
            held = served.stub.Create(pb.CreateRequest(text="a"))
            await served.engine.waiting.wait()
            error = await failure_of(served.stub.Get(pb.GetRequest(context_id="c0")))
            assert isinstance(error, errors.PoolExhausted)
            assert error.reason is None
            served.engine.gate.set()
            assert (await held).context.length == 2

    run(scenario())


@pytest.mark.parametrize("host", ["::1", "localhost"])
def test_other_names_of_this_host_work(host: str) -> None:
    """Catches an IPv6 address glued to its port."""

    async def scenario() -> None:
        async with (
            Server(FakeEngine(), ServerConfig(host=host, port=0, grace=0.0)) as server,
            grpc.aio.insecure_channel(server.address) as channel,
        ):
            stub: Any = pb_grpc.ContextServiceStub(channel)
            await stub.GetServerInfo(pb.GetServerInfoRequest())

    run(scenario())


@pytest.mark.parametrize(
    "settings",
    [
        {"host": "0.0.0.0"},
        {"host": "example.org"},
        {"port": 65536},
        {"port": -1},
        {"max_message_bytes": 0},
        {"max_message_bytes": 2**31},
        {"stall_timeout": 0.0},
        {"grace": -1.0},
        {"max_concurrent_rpcs": 0},
        {"default_deadline": 10.0, "max_deadline": 5.0},
    ],
    ids=str,
)
def test_a_bad_config_is_refused(settings: dict[str, Any]) -> None:
    """Catches a server open to the world by a slip, or a number that fails much later."""
    with pytest.raises(InvalidRequest):
        ServerConfig(**settings)


def test_a_public_address_must_be_wanted() -> None:
    """Catches a way to serve other hosts that is missing altogether."""
    config = ServerConfig(host="0.0.0.0", insecure=True)
    assert not config.is_loopback
