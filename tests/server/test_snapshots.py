"""Snapshots over the wire: what travels, what is refused, and a server that comes back."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from server.fake_engine import FakeEngine
from server.harness import failure_of, run, serving
from server.real_engine import WAIT, really_serving, tiny_engine

from agentkv.config import SnapshotConfig
from agentkv.errors import Reason
from agentkv.v1 import agentkv_pb2 as pb
from agentkv.v1 import agentkv_pb2_grpc as pb_grpc


def test_every_field_travels() -> None:
    """Catches an option that is not passed on, or a field of an answer that is not copied."""

    async def scenario() -> None:
        async with serving(FakeEngine()) as served:
            id = (await served.stub.Create(pb.CreateRequest(text="abc"))).context.id
            request = pb.SaveRequest(context_id=id, name="a", recursive=True, overwrite=True)
            saved = await served.stub.Save(request)
            assert saved.pool.total_blocks == 64
            info = saved.snapshot
            assert (info.name, info.model_name, info.num_contexts) == ("a", "fake", 2)
            assert (info.num_tokens, info.num_kv_tokens, info.num_bytes) == (4, 4, 78)
            assert info.create_time.ToNanoseconds() == 1_700_000_000_500_000_000
            lease = pb.LeaseOptions(mode=pb.LEASE_MODE_PIN)
            asked = pb.RestoreRequest(name="a", lease=lease, request_id="once")
            restored = await served.stub.Restore(asked)
            (context,) = restored.contexts
            assert context.id == "restored by once" and context.lease.mode == lease.mode
            assert list(restored.saved_ids) == ["saved"]
            assert (restored.num_kv_tokens, restored.kv_refusal) == (4, "why not")
            without = await served.stub.Restore(pb.RestoreRequest(name="a", tokens_only=True))
            assert without.num_kv_tokens == 0
            listed = await served.stub.ListSnapshots(pb.ListSnapshotsRequest())
            assert list(listed.snapshots) == [info]
            gone = pb.DeleteSnapshotRequest(name="a")
            await served.stub.DeleteSnapshot(gone)
            error = await failure_of(served.stub.DeleteSnapshot(gone))
            assert error.reason is Reason.SNAPSHOT_NOT_FOUND
            gone.allow_missing = True
            await served.stub.DeleteSnapshot(gone)

    run(scenario())


@pytest.mark.parametrize("name", ["", "../x", "a/b", ".hidden", "a" * 129, "a\0b", "ü"])
def test_a_name_that_leads_elsewhere_is_refused(tmp_path: Path, name: str) -> None:
    """Catches a name that is a path, which would reach another tenant's files."""

    async def scenario() -> None:
        engine = tiny_engine(snapshots=SnapshotConfig(dir=str(tmp_path)))
        async with really_serving(engine) as served:
            id = (await served.stub.Create(pb.CreateRequest(text="abc"))).context.id
            calls: list[Any] = [
                served.stub.Save(pb.SaveRequest(context_id=id, name=name)),
                served.stub.Restore(pb.RestoreRequest(name=name)),
                served.stub.DeleteSnapshot(pb.DeleteSnapshotRequest(name=name)),
            ]
            for call in calls:
                error = await failure_of(call)
                assert error.reason is Reason.INVALID_REQUEST
                assert list(error.violations) == ["name"]

    run(scenario())
    assert list(tmp_path.iterdir()) == []


def test_without_a_folder_the_option_is_named() -> None:
    """Catches a refusal that does not say what the operator has to do."""

    async def scenario() -> None:
        async with really_serving(tiny_engine()) as served:
            id = (await served.stub.Create(pb.CreateRequest(text="abc"))).context.id
            error = await failure_of(served.stub.Save(pb.SaveRequest(context_id=id, name="a")))
            assert error.reason is Reason.SNAPSHOTS_OFF
            assert "--snapshot-dir" in error.message

    run(scenario())


@pytest.mark.slow
def test_a_tree_outlives_the_process_that_saved_it(tmp_path: Path) -> None:
    """Catches a snapshot that only the process which wrote it can read."""
    prompt = pb.CreateRequest(text="Once upon a time there was a server")
    sampling = pb.SamplingOptions(max_tokens=8, temperature=1.0, seed=5)

    async def goes_on(stub: Any, ids: list[str]) -> list[list[int]]:
        found = []
        for id in ids:
            call = stub.Generate(pb.GenerateRequest(context_id=id, sampling=sampling))
            found.append([token async for part in call for token in part.chunk.token_ids])
        return found

    answers: list[list[list[int]]] = []

    async def save(address: str) -> None:
        async with grpc.aio.insecure_channel(address) as channel:
            stub: Any = pb_grpc.ContextServiceStub(channel)
            root_id = (await stub.Create(prompt)).context.id
            forked = await stub.Fork(pb.ForkRequest(context_id=root_id, count=2, at=21))
            await stub.Save(pb.SaveRequest(context_id=root_id, name="tree", recursive=True))
            ids = [root_id, *(context.id for context in forked.contexts)]
            answers.append(await goes_on(stub, ids))

    async def restore(address: str) -> None:
        async with grpc.aio.insecure_channel(address) as channel:
            stub: Any = pb_grpc.ContextServiceStub(channel)
            restored = await stub.Restore(pb.RestoreRequest(name="tree"))
            assert restored.num_kv_tokens == restored.contexts[0].length
            answers.append(await goes_on(stub, [context.id for context in restored.contexts]))

    for scenario in (save, restore):
        with _process(tmp_path) as process:
            assert process.stdout is not None and process.stderr is not None
            address = process.stdout.readline().strip()
            assert address, process.stderr.read()
            run(scenario(address))
            process.send_signal(signal.SIGTERM)
            assert process.wait(timeout=WAIT) == 0
            assert process.stderr.read() == ""
    assert answers[0] == answers[1]


def _process(folder: Path) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("serve_tiny.py")), "0", "0.2", str(folder)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
