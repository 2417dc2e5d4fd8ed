"""What a watcher is told, as messages of its stream."""

from collections.abc import Sequence
from types import MappingProxyType
from typing import Final

from agentkv.core.watch import Change, ChangeKind, PoolChange, Snapshot, WatchUpdate
from agentkv.server.convert import answers
from agentkv.v1 import agentkv_pb2 as pb

CHANGE_KINDS: Final = MappingProxyType(
    {
        ChangeKind.CREATED: pb.CHANGE_KIND_CREATED,
        ChangeKind.FORKED: pb.CHANGE_KIND_FORKED,
        ChangeKind.RELEASED: pb.CHANGE_KIND_RELEASED,
        ChangeKind.RESIZED: pb.CHANGE_KIND_RESIZED,
        ChangeKind.LEASED: pb.CHANGE_KIND_LEASED,
        ChangeKind.EXPIRING: pb.CHANGE_KIND_EXPIRING,
        ChangeKind.EXPIRED: pb.CHANGE_KIND_EXPIRED,
        ChangeKind.EVICTED: pb.CHANGE_KIND_EVICTED,
        ChangeKind.PARKED: pb.CHANGE_KIND_PARKED,
        ChangeKind.RESTORED: pb.CHANGE_KIND_RESTORED,
    }
)


def watched(updates: Sequence[WatchUpdate]) -> pb.WatchResponse:
    """Translates what a watcher is told at once."""
    return pb.WatchResponse(events=[_watch_event(update) for update in updates])


def _watch_event(update: WatchUpdate) -> pb.WatchEvent:
    match update:
        case Snapshot():
            snapshot = pb.WatchSnapshot(
                contexts=[answers.context(view) for view in update.contexts],
                pool=answers.pool(update.pool),
                is_first=update.is_first,
                is_last=update.is_last,
            )
            return pb.WatchEvent(sequence=update.sequence, snapshot=snapshot)
        case PoolChange():
            return pb.WatchEvent(sequence=update.sequence, pressure=answers.pool(update.pool))
        case Change():
            change = pb.ContextChange(
                kind=CHANGE_KINDS[update.kind],
                context_id=update.context_id,
                parent_id=update.parent_id,
                root_id=update.root_id,
                fork_position=update.fork_position,
                length=update.length,
                lease=answers.lease(update.lease, update.expire_time),
            )
            return pb.WatchEvent(sequence=update.sequence, change=change)
