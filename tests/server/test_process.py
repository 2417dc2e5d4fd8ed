"""A server as a process of its own: how it ends, and what it leaves when it cannot begin."""

import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from server.harness import failure_of, run
from server.real_engine import WAIT, tiny_engine

from agentkv import errors
from agentkv.config import ServerConfig
from agentkv.engine.async_engine import AsyncEngine
from agentkv.errors import Reason
from agentkv.server.main import serve
from agentkv.v1 import agentkv_pb2 as pb
from agentkv.v1 import agentkv_pb2_grpc as pb_grpc


@pytest.mark.slow
def test_sigterm_ends_a_process_under_load_in_order() -> None:
    """Catches a stop that hangs with the engine's thread, or that looks like a crash."""
    process = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("serve_tiny.py")), "0", "0.2"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stdout is not None and process.stderr is not None
        address = process.stdout.readline().strip()
        assert address, process.stderr.read()

        async def scenario() -> None:
            async with grpc.aio.insecure_channel(address) as channel:
                stub: Any = pb_grpc.ContextServiceStub(channel)
                answer = await stub.Create(pb.CreateRequest(text="a"))
                sampling = pb.SamplingOptions(max_tokens=4000)
                call = stub.GenerateBranches(
                    pb.GenerateBranchesRequest(
                        context_id=answer.context.id, count=5, sampling=sampling
                    )
                )
                await call.read()
                process.send_signal(signal.SIGTERM)
                error = await failure_of(call)
                assert isinstance(error, errors.Unavailable)
                assert error.reason is Reason.SHUTTING_DOWN

        run(scenario())
        assert process.wait(timeout=WAIT) == 0
        assert process.stderr.read() == ""


def test_a_taken_port_leaves_no_thread_of_the_engine() -> None:
    """Catches a process that cannot serve, and cannot end either."""

    async def scenario() -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
            with pytest.raises(errors.InvalidRequest, match=f"127.0.0.1:{port}"):
                await serve(AsyncEngine(tiny_engine()), ServerConfig(port=port))
        assert "agentkv-engine" not in {thread.name for thread in threading.enumerate()}

    run(scenario())
