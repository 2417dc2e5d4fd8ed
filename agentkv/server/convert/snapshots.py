"""Snapshots, and what came back from one, as messages."""

from agentkv.engine.outputs import Restored, SnapshotView
from agentkv.server.convert import answers
from agentkv.v1 import agentkv_pb2 as pb


def snapshot(view: SnapshotView) -> pb.Snapshot:
    """Translates a snapshot."""
    message = pb.Snapshot(
        name=view.name,
        model_name=view.model_name,
        num_contexts=view.num_contexts,
        num_tokens=view.num_tokens,
        num_kv_tokens=view.num_kv_tokens,
        num_bytes=view.num_bytes,
    )
    message.create_time.FromNanoseconds(int(view.create_time * 1e9))
    return message


def restored(value: Restored) -> pb.RestoreResponse:
    """Translates the answer of Restore."""
    return pb.RestoreResponse(
        contexts=[answers.context(view) for view in value.contexts],
        saved_ids=value.saved_ids,
        num_kv_tokens=value.num_kv_tokens,
        kv_refusal=value.kv_refusal,
        pool=answers.pool(value.pool),
    )
