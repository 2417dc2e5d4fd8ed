"""Messages of the wire as values of the SDK. It copies; what fields mean stands in the contract."""

import json
from dataclasses import fields
from datetime import UTC
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, TypeVar

from google.protobuf.message import Message

from agentkv import status
from agentkv.client.completion import Chunk, FinishReason, ToolCall, TopLogprobs
from agentkv.client.server_info import CountersInfo, LimitsInfo, ModelInfo, ServerInfo
from agentkv.client.values import (
    ContextInfo,
    ContinuationScore,
    PoolInfo,
    Released,
    Residency,
    Usage,
)
from agentkv.errors import AgentKVError, InternalError, Reason
from agentkv.v1 import agentkv_pb2 as pb

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    ValueT = TypeVar("ValueT", bound=DataclassInstance)

RESIDENCIES: Final = MappingProxyType(
    {
        pb.RESIDENCY_DEVICE: Residency.DEVICE,
        pb.RESIDENCY_PARTIAL: Residency.PARTIAL,
        pb.RESIDENCY_NONE: Residency.NONE,
    }
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
        residency=RESIDENCIES.get(message.residency, Residency.UNKNOWN),
        pinned=message.pinned,
        has_head_logits=message.has_head_logits,
        busy=message.busy,
        num_children=message.num_children,
        labels=MappingProxyType(dict(message.labels)),
        create_time=message.create_time.ToDatetime(tzinfo=UTC),
    )


def usage(message: pb.Usage) -> Usage:
    """Reads the tokens a request ran, reused and made."""
    return _copied(Usage, message)


def pool(message: pb.Pool) -> PoolInfo:
    """Reads the numbers of the pool."""
    return _copied(PoolInfo, message)


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
    return status.TABLE[reason].error(message.message, reason=reason, metadata=metadata)


def server_info(message: pb.GetServerInfoResponse) -> ServerInfo:
    """Reads what a server says about itself."""
    return ServerInfo(
        server_version=message.server_version,
        api_versions=tuple(message.api_versions),
        model=_copied(ModelInfo, message.model),
        pool=pool(message.pool),
        limits=_copied(LimitsInfo, message.limits),
        sampling_options=tuple(message.sampling_options),
        counters=_copied(CountersInfo, message.counters),
    )


def _copied(type_: "type[ValueT]", message: Message) -> "ValueT":
    """Copies every field of a value from the field of the same name."""
    return type_(**{field.name: getattr(message, field.name) for field in fields(type_)})
