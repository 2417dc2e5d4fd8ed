"""Messages of the wire as values of the SDK. It copies; what fields mean stands in the contract."""

import json
from dataclasses import fields, replace
from datetime import UTC
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, TypeVar

from google.protobuf.message import Message

from agentkv import status
from agentkv.client.completion import Chunk, FinishReason, ToolCall, TopLogprobs
from agentkv.client.server_info import (
    CountersInfo,
    DiskCountersInfo,
    LimitsInfo,
    ModelInfo,
    ServerInfo,
)
from agentkv.client.snapshot_info import SnapshotInfo
from agentkv.client.usage_info import Bill, QuotaInfo, Tier, TierUsage, UsageInfo
from agentkv.client.values import (
    ContextInfo,
    ContinuationScore,
    LeaseInfo,
    LeaseMode,
    LeaseReduction,
    PoolInfo,
    PressureLevel,
    Released,
    Residency,
    Usage,
)
from agentkv.client.watch_events import ChangeKind, ContextChange
from agentkv.errors import AgentKVError, InternalError, PoolExhausted, Reason
from agentkv.v1 import agentkv_pb2 as pb

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    ValueT = TypeVar("ValueT", bound=DataclassInstance)

RESIDENCIES: Final = MappingProxyType(
    {
        pb.RESIDENCY_DEVICE: Residency.DEVICE,
        pb.RESIDENCY_HOST: Residency.HOST,
        pb.RESIDENCY_DISK: Residency.DISK,
        pb.RESIDENCY_PARTIAL: Residency.PARTIAL,
        pb.RESIDENCY_NONE: Residency.NONE,
    }
)
LEASE_MODES: Final = MappingProxyType(
    {
        pb.LEASE_MODE_RETAIN: LeaseMode.RETAIN,
        pb.LEASE_MODE_PIN: LeaseMode.PIN,
        pb.LEASE_MODE_PARK: LeaseMode.PARK,
        pb.LEASE_MODE_DROPPABLE: LeaseMode.DROPPABLE,
    }
)
REDUCTIONS: Final = MappingProxyType(
    {
        pb.LEASE_REDUCTION_PIN_QUOTA: LeaseReduction.PIN_QUOTA,
        pb.LEASE_REDUCTION_MAX_TTL: LeaseReduction.MAX_TTL,
    }
)
PRESSURE_LEVELS: Final = MappingProxyType(
    {
        pb.PRESSURE_LEVEL_OK: PressureLevel.OK,
        pb.PRESSURE_LEVEL_SOFT: PressureLevel.SOFT,
        pb.PRESSURE_LEVEL_HARD: PressureLevel.HARD,
    }
)
CHANGE_KINDS: Final = MappingProxyType(
    {
        pb.CHANGE_KIND_CREATED: ChangeKind.CREATED,
        pb.CHANGE_KIND_FORKED: ChangeKind.FORKED,
        pb.CHANGE_KIND_RELEASED: ChangeKind.RELEASED,
        pb.CHANGE_KIND_RESIZED: ChangeKind.RESIZED,
        pb.CHANGE_KIND_LEASED: ChangeKind.LEASED,
        pb.CHANGE_KIND_EXPIRING: ChangeKind.EXPIRING,
        pb.CHANGE_KIND_EXPIRED: ChangeKind.EXPIRED,
        pb.CHANGE_KIND_EVICTED: ChangeKind.EVICTED,
        pb.CHANGE_KIND_PARKED: ChangeKind.PARKED,
        pb.CHANGE_KIND_RESTORED: ChangeKind.RESTORED,
    }
)
TIERS: Final = MappingProxyType(
    {pb.TIER_DEVICE: Tier.DEVICE, pb.TIER_HOST: Tier.HOST, pb.TIER_DISK: Tier.DISK}
)
FINISH_REASONS: Final = MappingProxyType(
    {
        pb.FINISH_REASON_STOP: FinishReason.STOP,
        pb.FINISH_REASON_LENGTH: FinishReason.LENGTH,
        pb.FINISH_REASON_ERROR: FinishReason.ERROR,
        pb.FINISH_REASON_DEAD_END: FinishReason.DEAD_END,
        pb.FINISH_REASON_TOOL_CALL: FinishReason.TOOL_CALL,
    }
)


def lease(message: pb.Lease) -> LeaseInfo:
    """Reads the lease of a context."""
    expires = message.HasField("expire_time")
    return LeaseInfo(
        mode=LEASE_MODES.get(message.mode, LeaseMode.UNKNOWN),
        ttl=message.ttl,
        expire_time=message.expire_time.ToDatetime(tzinfo=UTC) if expires else None,
        reductions=tuple(
            REDUCTIONS.get(reduction, LeaseReduction.UNKNOWN) for reduction in message.reductions
        ),
    )


def context(message: pb.Context) -> ContextInfo:
    """Reads a context."""
    return ContextInfo(
        id=message.id,
        parent_id=message.parent_id if message.HasField("parent_id") else None,
        fork_position=message.fork_position,
        root_id=message.root_id,
        depth=message.depth,
        length=message.length,
        num_computed_tokens=message.num_computed_tokens,
        private_blocks=message.private_blocks,
        shared_blocks=message.shared_blocks,
        host_blocks=message.host_blocks,
        disk_blocks=message.disk_blocks,
        residency=RESIDENCIES.get(message.residency, Residency.UNKNOWN),
        pinned=message.pinned,
        has_head_logits=message.has_head_logits,
        busy=message.busy,
        num_children=message.num_children,
        labels=MappingProxyType(dict(message.labels)),
        create_time=message.create_time.ToDatetime(tzinfo=UTC),
        reclaimable_blocks=message.reclaimable_blocks,
        lease=lease(message.lease),
        adapter=message.adapter,
    )


def usage(message: pb.Usage) -> Usage:
    """Reads the tokens a request ran, reused and made."""
    return _copied(Usage, message)


def pool(message: pb.Pool) -> PoolInfo:
    """Reads the numbers of the pool."""
    level = PRESSURE_LEVELS.get(message.level, PressureLevel.UNKNOWN)
    return replace(_copied(PoolInfo, message), level=level)


def change(message: pb.WatchEvent) -> ContextChange:
    """Reads what happened to a context."""
    told = message.change
    return ContextChange(
        sequence=message.sequence,
        kind=CHANGE_KINDS.get(told.kind, ChangeKind.UNKNOWN),
        context_id=told.context_id,
        parent_id=told.parent_id if told.HasField("parent_id") else None,
        root_id=told.root_id,
        fork_position=told.fork_position,
        length=told.length,
        lease=lease(told.lease),
    )


def snapshot(message: pb.Snapshot) -> SnapshotInfo:
    """Reads what is known of a snapshot."""
    return SnapshotInfo(
        name=message.name,
        create_time=message.create_time.ToDatetime(tzinfo=UTC),
        model_name=message.model_name,
        num_contexts=message.num_contexts,
        num_tokens=message.num_tokens,
        num_kv_tokens=message.num_kv_tokens,
        num_bytes=message.num_bytes,
    )


def released(message: pb.ReleaseResponse) -> Released:
    """Reads what a release gave back."""
    return _copied(Released, message)


def score(message: pb.ContinuationScore) -> ContinuationScore:
    """Reads the score of one continuation."""
    return ContinuationScore(tuple(message.token_ids), tuple(message.logprobs), message.total)


def chunk(message: pb.Chunk) -> Chunk:
    """Reads tokens of one step."""
    tops = message.top_logprobs
    return Chunk(
        message.branch,
        tuple(message.token_ids),
        message.text,
        tuple(message.logprobs),
        tuple(TopLogprobs(tuple(top.token_ids), tuple(top.logprobs)) for top in tops),
    )


def tool_call(message: pb.ToolCall) -> ToolCall:
    """Reads a call; the server has parsed its arguments before it called it one."""
    return ToolCall(message.name, json.loads(message.arguments))


def branch_error(message: pb.BranchError) -> AgentKVError:
    """Reads why a branch failed, as the exception that a failed call would have raised."""
    metadata = dict(message.metadata)
    if message.reason not in Reason.__members__:  # a newer server's
        return InternalError(message.message, metadata={**metadata, "reason": message.reason})
    reason = Reason(message.reason)
    error = status.TABLE[reason].error(message.message, reason=reason, metadata=metadata)
    if isinstance(error, PoolExhausted) and message.HasField("retry_after"):
        error.retry_after = message.retry_after
    return error


def server_info(message: pb.GetServerInfoResponse) -> ServerInfo:
    """Reads what a server says about itself."""
    return ServerInfo(
        server_version=message.server_version,
        api_versions=tuple(message.api_versions),
        model=replace(_copied(ModelInfo, message.model), adapters=tuple(message.model.adapters)),
        pool=pool(message.pool),
        limits=_copied(LimitsInfo, message.limits),
        sampling_options=tuple(message.sampling_options),
        counters=counters(message.counters),
    )


def counters(message: pb.Counters) -> CountersInfo:
    """Reads a server's counts."""
    disk = _copied(DiskCountersInfo, message.disk) if message.HasField("disk") else None
    return replace(_copied(CountersInfo, message), disk=disk)


def quotas(message: pb.Quotas) -> QuotaInfo:
    """Reads a tenant's quotas."""
    has_seconds = message.HasField("max_block_seconds")
    return QuotaInfo(
        blocks=message.blocks,
        max_blocks=message.max_blocks if message.HasField("max_blocks") else None,
        block_seconds=message.block_seconds,
        max_block_seconds=message.max_block_seconds if has_seconds else None,
        window=message.window,
        contexts=message.contexts,
        max_contexts=message.max_contexts,
        max_depth=message.max_depth,
        max_fan_out=message.max_fan_out if message.HasField("max_fan_out") else None,
    )


def usage_info(message: pb.GetUsageResponse) -> UsageInfo:
    """Reads what was used."""
    return UsageInfo(
        bill=_copied(Bill, message.bill),
        num_contexts=message.num_contexts,
        quotas=quotas(message.quotas),
        tiers=tuple(
            TierUsage(
                TIERS.get(item.tier, Tier.UNKNOWN),
                item.taken_block_seconds,
                item.held_block_seconds,
                item.unheld_block_seconds,
            )
            for item in message.tiers
        ),
    )


def _copied(type_: "type[ValueT]", message: Message) -> "ValueT":
    """Copies every field of a value from the field of the same name."""
    return type_(**{field.name: getattr(message, field.name) for field in fields(type_)})
