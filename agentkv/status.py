"""The closed table of errors: each reason's gRPC code and exception; both directions of the wire.

It owns how an `AgentKVError` becomes a `google.rpc.Status` and how a failed call becomes an
`AgentKVError` again. It knows no RPC: the server hands it errors, the client hands it calls.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, NamedTuple

import grpc
from google.protobuf.any_pb2 import Any
from google.protobuf.message import DecodeError, Message
from google.rpc import error_details_pb2 as details_pb2
from google.rpc import status_pb2
from grpc_status import rpc_status

from agentkv import errors
from agentkv.errors import AgentKVError, Reason

DOMAIN: Final = "agentkv"
"""`ErrorInfo.domain` of every error of ours."""
PUSHBACK_KEY: Final = "grpc-retry-pushback-ms"
"""Trailing metadata that gRPC's own retries obey; a negative value means: do not retry."""
MAX_VIOLATIONS: Final = 32
MAX_STATUS_BYTES: Final = 7_000
"""Above about 8 KB of metadata a peer drops the whole error, so details give way before that."""
MAX_MESSAGE_BYTES: Final = 1024
MAX_VALUE_BYTES: Final = 256
MAX_METADATA: Final = 16


class Row(NamedTuple):
    """How one reason travels."""

    code: grpc.StatusCode
    error: type[AgentKVError]


_Code = grpc.StatusCode

TABLE: Final[Mapping[Reason, Row]] = MappingProxyType(
    {
        Reason.INVALID_REQUEST: Row(_Code.INVALID_ARGUMENT, errors.InvalidRequest),
        Reason.UNSUPPORTED_OPTION: Row(_Code.INVALID_ARGUMENT, errors.InvalidRequest),
        Reason.TOKEN_OUT_OF_RANGE: Row(_Code.INVALID_ARGUMENT, errors.InvalidRequest),
        Reason.GRAMMAR_REJECTED: Row(_Code.INVALID_ARGUMENT, errors.InvalidRequest),
        Reason.REQUEST_ID_REUSED: Row(_Code.INVALID_ARGUMENT, errors.InvalidRequest),
        Reason.CONTEXT_TOO_LONG: Row(_Code.OUT_OF_RANGE, errors.InvalidRequest),
        Reason.POSITION_OUT_OF_RANGE: Row(_Code.OUT_OF_RANGE, errors.InvalidRequest),
        Reason.CONTEXT_NOT_FOUND: Row(_Code.NOT_FOUND, errors.NotFound),
        Reason.SNAPSHOT_NOT_FOUND: Row(_Code.NOT_FOUND, errors.NotFound),
        Reason.SNAPSHOT_EXISTS: Row(_Code.ALREADY_EXISTS, errors.InvalidRequest),
        Reason.SNAPSHOT_CORRUPT: Row(_Code.DATA_LOSS, errors.ContextLost),
        Reason.SERVER_RESTARTED: Row(_Code.FAILED_PRECONDITION, errors.ContextLost),
        Reason.MODEL_MISMATCH: Row(_Code.FAILED_PRECONDITION, errors.InvalidRequest),
        Reason.CHAT_NOT_EXTENDABLE: Row(_Code.FAILED_PRECONDITION, errors.InvalidRequest),
        Reason.SNAPSHOTS_OFF: Row(_Code.FAILED_PRECONDITION, errors.InvalidRequest),
        Reason.CONTEXT_BUSY: Row(_Code.ABORTED, errors.ContextBusy),
        Reason.CONTEXT_MOVED: Row(_Code.ABORTED, errors.ContextMoved),
        Reason.CONTEXT_RELEASED: Row(_Code.ABORTED, errors.NotFound),
        Reason.KV_BLOCKS_EXHAUSTED: Row(_Code.RESOURCE_EXHAUSTED, errors.PoolExhausted),
        Reason.TENANT_QUOTA: Row(_Code.RESOURCE_EXHAUSTED, errors.PoolExhausted),
        Reason.QUEUE_FULL: Row(_Code.RESOURCE_EXHAUSTED, errors.PoolExhausted),
        Reason.DISK_FULL: Row(_Code.RESOURCE_EXHAUSTED, errors.PoolExhausted),
        Reason.SLOW_READER: Row(_Code.RESOURCE_EXHAUSTED, errors.SlowReader),
        Reason.BAD_CREDENTIALS: Row(_Code.UNAUTHENTICATED, errors.Unauthenticated),
        Reason.CONTEXT_LOST: Row(_Code.UNAVAILABLE, errors.ContextLost),
        Reason.SHUTTING_DOWN: Row(_Code.UNAVAILABLE, errors.Unavailable),
        Reason.ENGINE_STALLED: Row(_Code.UNAVAILABLE, errors.Unavailable),
        Reason.ENGINE_STEP_FAILED: Row(_Code.INTERNAL, errors.InternalError),
        Reason.INTERNAL_ERROR: Row(_Code.INTERNAL, errors.InternalError),
    }
)
"""Every reason. Adding one to `Reason` without a row here fails a test."""

WITHOUT_REASON: Final[Mapping[grpc.StatusCode, type[AgentKVError]]] = MappingProxyType(
    {
        _Code.CANCELLED: errors.Cancelled,
        _Code.DEADLINE_EXCEEDED: errors.DeadlineExceeded,
        _Code.INVALID_ARGUMENT: errors.InvalidRequest,
        _Code.OUT_OF_RANGE: errors.InvalidRequest,
        _Code.FAILED_PRECONDITION: errors.InvalidRequest,
        _Code.ALREADY_EXISTS: errors.InvalidRequest,
        _Code.UNIMPLEMENTED: errors.InvalidRequest,
        _Code.NOT_FOUND: errors.NotFound,
        _Code.ABORTED: errors.ContextBusy,
        # A message over the size limit or one call too many: gRPC's text alone tells which.
        _Code.RESOURCE_EXHAUSTED: errors.PoolExhausted,
        _Code.UNAUTHENTICATED: errors.Unauthenticated,
        _Code.PERMISSION_DENIED: errors.Unauthenticated,
        _Code.UNAVAILABLE: errors.Unavailable,
    }
)
"""What a code means when gRPC or a proxy raised it; any other is an InternalError."""


def code_of(error: AgentKVError) -> grpc.StatusCode:
    """Names the gRPC code of an error: its reason's, or its class's when it has none."""
    if error.reason is not None:
        return TABLE[error.reason].code
    return next(
        (code for code, class_ in WITHOUT_REASON.items() if class_ is type(error)), _Code.INTERNAL
    )


def to_status(error: AgentKVError) -> status_pb2.Status:
    """Translates an error for the wire.

    Returns:
        A status below 8 KB: at most 32 field violations, fewer when they are long. Long texts are
        cut.
    """
    status = status_pb2.Status(
        code=code_of(error).value[0], message=_cut(error.message, MAX_MESSAGE_BYTES)
    )
    if error.reason is not None:
        metadata = {
            _cut(name, 64): _cut(value, MAX_VALUE_BYTES)
            for name, value in list(error.metadata.items())[:MAX_METADATA]
        }
        _attach(
            status,
            details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN, metadata=metadata),
        )
    retry_after = _retry_after(error)
    if retry_after is not None:
        retry = details_pb2.RetryInfo()
        retry.retry_delay.FromNanoseconds(int(retry_after * 1e9))
        _attach(status, retry)
    if error.reason is Reason.TENANT_QUOTA:
        quota = details_pb2.QuotaFailure.Violation(subject="tenant", description=status.message)
        _attach(status, details_pb2.QuotaFailure(violations=[quota]))
    if error.violations:
        _attach(status, _bad_request(error, MAX_STATUS_BYTES - status.ByteSize()))
    return status


def trailing_metadata(error: AgentKVError) -> tuple[tuple[str, str | bytes], ...]:
    """Builds the metadata that ends a failed call: the rich status, and a retry hint if any.

    gRPC's own retries obey the hint in metadata alone, so it is told twice.
    """
    metadata: tuple[tuple[str, str | bytes], ...] = rpc_status.to_status(
        to_status(error)
    ).trailing_metadata
    if error.reason is Reason.CONTEXT_LOST:
        # UNAVAILABLE is what clients retry by themselves, and here it would never help.
        return (*metadata, (PUSHBACK_KEY, "-1"))
    retry_after = _retry_after(error)
    if retry_after is not None:
        return (*metadata, (PUSHBACK_KEY, str(round(retry_after * 1000))))
    return metadata


def from_rpc_error(error: grpc.RpcError, *, request_id: str | None = None) -> AgentKVError:
    """Translates a failed call into the exception its reason names.

    Args:
        error: What a stub raised, of either gRPC stack.
        request_id: The caller's id of the call, to be shown on the exception.

    Returns:
        The exception to raise. Without a reason this version knows, its class follows from the
        gRPC code and `reason` is None; a reason of a newer server is in `metadata["reason"]`.
    """
    if not isinstance(error, grpc.Call | grpc.aio.AioRpcError):
        # The blocking stack raises bare RpcErrors only for faults of its own.
        return _without_reason(_Code.UNKNOWN, str(error), {}, request_id)
    code, message = error.code(), error.details() or ""
    try:
        status = rpc_status.from_call(error)
    except (ValueError, DecodeError):  # not ours: a proxy's, or damaged
        status = None
    return _from_status(code, message, status or status_pb2.Status(), request_id)


def _from_status(
    code: grpc.StatusCode, message: str, status: status_pb2.Status, request_id: str | None
) -> AgentKVError:
    info, retry, bad_request = (
        details_pb2.ErrorInfo(),
        details_pb2.RetryInfo(),
        details_pb2.BadRequest(),
    )
    for detail in status.details:
        for message_type in (info, retry, bad_request):
            if detail.Is(message_type.DESCRIPTOR):
                detail.Unpack(message_type)
    metadata = dict(info.metadata)
    if info.domain != DOMAIN or info.reason not in Reason.__members__:
        if info.reason:
            metadata["reason"] = info.reason
        return _without_reason(code, message, metadata, request_id)
    reason = Reason(info.reason)
    result = TABLE[reason].error(
        message,
        reason=reason,
        metadata=metadata,
        violations={item.field: item.description for item in bad_request.field_violations},
        request_id=request_id,
    )
    if isinstance(result, errors.PoolExhausted) and retry.HasField("retry_delay"):
        result.retry_after = retry.retry_delay.ToNanoseconds() / 1e9
    return result


def _without_reason(
    code: grpc.StatusCode, message: str, metadata: dict[str, str], request_id: str | None
) -> AgentKVError:
    class_ = WITHOUT_REASON.get(code, errors.InternalError)
    text = message or f"The call failed with {code.name}."
    result = class_(text, metadata=metadata, request_id=request_id)
    result.reason = None  # the class's default names a cause that nobody stated
    return result


def _retry_after(error: AgentKVError) -> float | None:
    return error.retry_after if isinstance(error, errors.PoolExhausted) else None


def _bad_request(error: AgentKVError, max_bytes: int) -> details_pb2.BadRequest:
    bad_request = details_pb2.BadRequest()
    for field, description in list(error.violations.items())[:MAX_VIOLATIONS]:
        bad_request.field_violations.add(
            field=_cut(field, MAX_VALUE_BYTES), description=_cut(description, MAX_VALUE_BYTES)
        )
        if bad_request.ByteSize() > max_bytes:
            del bad_request.field_violations[-1]
            break
    return bad_request


def _attach(status: status_pb2.Status, detail: Message) -> None:
    packed = Any()
    packed.Pack(detail)
    status.details.append(packed)


def _cut(text: str, max_bytes: int) -> str:
    """Cuts a text to a number of UTF-8 bytes without cutting a character in two."""
    raw = text.encode(errors="replace")
    return raw.decode() if len(raw) <= max_bytes else raw[:max_bytes].decode(errors="ignore")
