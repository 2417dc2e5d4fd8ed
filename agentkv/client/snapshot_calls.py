"""Saving and restoring, written once for both clients: operations, run by a client's driver."""

from agentkv.client import messages, replies
from agentkv.client.handle_state import HandleState
from agentkv.client.lineage import Lineage
from agentkv.client.messages import Lease
from agentkv.client.operation import Operation
from agentkv.client.session import Session
from agentkv.client.snapshot_info import RestoredContexts, SnapshotInfo
from agentkv.v1 import agentkv_pb2 as pb


def save(
    session: Session,
    context_id: str,
    name: str,
    recursive: bool,
    with_kv: bool,
    overwrite: bool,
    timeout: float | None,
) -> Operation[SnapshotInfo]:
    """Saves a context or a tree.

    It is repeated when the server cannot be reached. Without `overwrite`, a repeat may find the
    name in use by what the attempt before it wrote; the error says that this may be so.
    """
    request = messages.save(
        context_id, name, recursive=recursive, tokens_only=not with_kv, overwrite=overwrite
    )
    reply = yield from session.send("Save", request, session.attempts(timeout))
    session.see(reply)
    return replies.snapshot(reply.snapshot)


def restore(
    session: Session, name: str, with_kv: bool, lease: Lease | None, timeout: float | None
) -> Operation[RestoredContexts[HandleState]]:
    """Restores contexts, once, however often the call is sent; all of them are owned."""
    request_id = session.make_id()
    request = messages.restore(name, lease, request_id, tokens_only=not with_kv)
    reply = yield from session.send("Restore", request, session.attempts(timeout), request_id)
    session.see(reply)
    lineages: dict[str, Lineage] = {}
    states = []
    for message in reply.contexts:
        above = lineages.get(message.parent_id, session.lineage)
        lineages[message.id] = above.adopt(message.id)
        info = replies.context(message)
        states.append(HandleState(session, info, lineages[message.id]))
    return RestoredContexts(
        tuple(states), tuple(reply.saved_ids), reply.num_kv_tokens, reply.kv_refusal
    )


def all_snapshots(session: Session, timeout: float | None) -> Operation[list[SnapshotInfo]]:
    """Lists the caller's snapshots."""
    request = pb.ListSnapshotsRequest()
    reply = yield from session.send("ListSnapshots", request, session.attempts(timeout))
    return [replies.snapshot(message) for message in reply.snapshots]


def delete(session: Session, name: str, timeout: float | None) -> Operation[None]:
    """Removes a snapshot; one that is gone already is passed over."""
    request = messages.delete_snapshot(name)
    yield from session.send("DeleteSnapshot", request, session.attempts(timeout))
