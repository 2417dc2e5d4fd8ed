"""Every error a caller can meet: one tree, each with a reason of one closed list.

    AgentKVError
    ├── InvalidRequest      the request can never succeed as it stands
    ├── NotFound            the handle names nothing the caller may see
    ├── ContextBusy         another request is changing this context; try again
    ├── ContextMoved        the context is not at the length the caller expected
    ├── ContextLost         the context existed, and its state is gone
    ├── PoolExhausted       blocks, a quota or a queue is full; says what would be needed
    ├── SlowReader          the stream was not read in time; the context survives
    ├── Unauthenticated     the credentials are missing or wrong
    ├── Unavailable         the server is starting, draining or stalled; try again
    ├── DeadlineExceeded    the call took longer than its deadline allows; carries no reason
    ├── Cancelled           the call was cancelled before it ended; carries no reason
    ├── InternalError       our fault; the message names a log id, never the cause
    └── UnsupportedModelError   the model cannot be served exactly; never crosses the wire

The reasons and their gRPC codes stand in `agentkv.status`. This module knows no wire.
"""

from collections.abc import Mapping
from enum import StrEnum


class Reason(StrEnum):
    """Machine-readable cause of an error: `ErrorInfo.reason` on the wire."""

    INVALID_REQUEST = "INVALID_REQUEST"
    UNSUPPORTED_OPTION = "UNSUPPORTED_OPTION"
    TOKEN_OUT_OF_RANGE = "TOKEN_OUT_OF_RANGE"
    GRAMMAR_REJECTED = "GRAMMAR_REJECTED"
    REQUEST_ID_REUSED = "REQUEST_ID_REUSED"
    CONTEXT_TOO_LONG = "CONTEXT_TOO_LONG"
    POSITION_OUT_OF_RANGE = "POSITION_OUT_OF_RANGE"
    CONTEXT_NOT_FOUND = "CONTEXT_NOT_FOUND"
    SNAPSHOT_NOT_FOUND = "SNAPSHOT_NOT_FOUND"
    SNAPSHOT_EXISTS = "SNAPSHOT_EXISTS"
    SNAPSHOT_CORRUPT = "SNAPSHOT_CORRUPT"
    SERVER_RESTARTED = "SERVER_RESTARTED"
    MODEL_MISMATCH = "MODEL_MISMATCH"
    CHAT_NOT_EXTENDABLE = "CHAT_NOT_EXTENDABLE"
    SNAPSHOTS_OFF = "SNAPSHOTS_OFF"
    CONTEXT_BUSY = "CONTEXT_BUSY"
    CONTEXT_MOVED = "CONTEXT_MOVED"
    CONTEXT_RELEASED = "CONTEXT_RELEASED"
    KV_BLOCKS_EXHAUSTED = "KV_BLOCKS_EXHAUSTED"
    TENANT_QUOTA = "TENANT_QUOTA"
    QUEUE_FULL = "QUEUE_FULL"
    DISK_FULL = "DISK_FULL"
    SLOW_READER = "SLOW_READER"
    BAD_CREDENTIALS = "BAD_CREDENTIALS"
    CONTEXT_LOST = "CONTEXT_LOST"
    SHUTTING_DOWN = "SHUTTING_DOWN"
    ENGINE_STALLED = "ENGINE_STALLED"
    ENGINE_STEP_FAILED = "ENGINE_STEP_FAILED"
    INTERNAL_ERROR = "INTERNAL_ERROR"


class AgentKVError(Exception):
    """Root of the tree.

    Attributes:
        message: What happened and what to do next, in one or two sentences.
        reason: The cause, from the closed list; None when gRPC itself failed.
        metadata: Numbers that go with the reason, as text: `need`, `free`, `actual_length`, ...
        violations: For a bad request, each offending field with what is wrong with it.
        request_id: The caller's id of the failed call, when there was one.
    """

    default_reason: Reason | None = None

    def __init__(
        self,
        message: str,
        *,
        reason: Reason | None = None,
        metadata: Mapping[str, str | int] | None = None,
        violations: Mapping[str, str] | None = None,
        request_id: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.reason = reason or self.default_reason
        self.metadata = {name: str(value) for name, value in (metadata or {}).items()}
        self.violations = dict(violations or {})
        self.request_id = request_id


class InvalidRequest(AgentKVError):
    """The request can never succeed as it stands; change it before sending it again."""

    default_reason = Reason.INVALID_REQUEST


class NotFound(AgentKVError):
    """The handle is unknown, released, expired or another tenant's: the answer is the same."""

    default_reason = Reason.CONTEXT_NOT_FOUND


class ContextBusy(AgentKVError):
    """Another request is changing this context; wait for it or cancel it, then try again."""

    default_reason = Reason.CONTEXT_BUSY


class ContextMoved(AgentKVError):
    """The context is not at `expected_length`; `metadata["actual_length"]` says where it is."""

    default_reason = Reason.CONTEXT_MOVED

    @property
    def actual_length(self) -> int:
        """Committed tokens of the context when the call was refused."""
        return int(self.metadata["actual_length"])


class ContextLost(AgentKVError):
    """The context existed, and its state is gone: create it again from its tokens."""

    default_reason = Reason.CONTEXT_LOST


class PoolExhausted(AgentKVError):
    """Blocks, a quota or a queue is full; the metadata says what is needed and what is free."""

    default_reason = Reason.KV_BLOCKS_EXHAUSTED

    def __init__(
        self,
        message: str,
        *,
        reason: Reason | None = None,
        metadata: Mapping[str, str | int] | None = None,
        violations: Mapping[str, str] | None = None,
        request_id: str | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(
            message,
            reason=reason,
            metadata=metadata,
            violations=violations,
            request_id=request_id,
        )
        self.retry_after = retry_after
        """Seconds after which trying again may succeed; None when waiting alone will not help."""


class SlowReader(AgentKVError):
    """The stream was not read within the server's stall time-out; the context survives."""

    default_reason = Reason.SLOW_READER


class Unauthenticated(AgentKVError):
    """The credentials are missing or wrong."""

    default_reason = Reason.BAD_CREDENTIALS


class Unavailable(AgentKVError):
    """The server cannot be reached, is draining, or its engine is stalled; try again."""

    default_reason = Reason.SHUTTING_DOWN


class DeadlineExceeded(AgentKVError):
    """The call took longer than its deadline, or the server's longest deadline, allows.

    What it had committed stays: `Get` says where the context is.
    """


class Cancelled(AgentKVError):
    """The call was cancelled before it ended; what it had committed stays."""


class InternalError(AgentKVError):
    """A fault of the server's own; the message names a log id."""

    default_reason = Reason.INTERNAL_ERROR


class UnsupportedModelError(AgentKVError):
    """The model cannot be served exactly; raised while loading, names what is not understood."""

    default_reason = Reason.UNSUPPORTED_OPTION
