"""The error table: complete, and the same in both directions."""

from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2 as details_pb2

from agentkv import errors, status
from agentkv.errors import AgentKVError, Reason


class FailedCall(grpc.RpcError, grpc.Call):
    """What a stub raises, with the parts that travel."""

    def __init__(
        self,
        code: grpc.StatusCode,
        details: str,
        metadata: tuple[tuple[str, str | bytes], ...] = (),
    ) -> None:
        self._parts = (code, details, metadata)

    def code(self) -> grpc.StatusCode:
        return self._parts[0]

    def details(self) -> str:
        return self._parts[1]

    def trailing_metadata(self) -> Any:
        return self._parts[2]

    def initial_metadata(self) -> Any:
        return ()

    def is_active(self) -> bool:
        return False

    def time_remaining(self) -> float:
        return 0.0

    def cancel(self) -> bool:
        return False

    def add_callback(self, callback: object) -> bool:
        return False


def over_the_wire(error: AgentKVError) -> AgentKVError:
    """Sends an error through both halves of the table."""
    sent = status.to_status(error)
    return status.from_rpc_error(
        FailedCall(status.code_of(error), sent.message, status.trailing_metadata(error))
    )


def test_every_reason_has_a_row() -> None:
    """Catches a reason added without a code: the server would fail while reporting a failure."""
    assert set(status.TABLE) == set(Reason)


def test_every_exception_is_reachable() -> None:
    """Catches an exception class that no wire answer ever becomes, and so nobody can catch."""
    reachable = {row.error for row in status.TABLE.values()} | set(status.WITHOUT_REASON.values())
    assert reachable == set(AgentKVError.__subclasses__()) - {errors.UnsupportedModelError}


def test_errors_docstring_draws_the_whole_tree() -> None:
    """Catches a class missing from the picture that users read."""
    assert errors.__doc__ is not None
    assert all(class_.__name__ in errors.__doc__ for class_ in AgentKVError.__subclasses__())


@pytest.mark.parametrize("reason", Reason)
def test_a_reason_survives_the_wire(reason: Reason) -> None:
    """Catches a class, reason, number or hint lost between server and client."""
    class_ = status.TABLE[reason].error
    error = class_("Too bad.", reason=reason, metadata={"need": 3, "actual_length": 7})
    if isinstance(error, errors.PoolExhausted):
        error.retry_after = 0.75
    received = over_the_wire(error)
    assert type(received) is class_
    assert received.reason is reason
    assert received.message == "Too bad."
    assert received.metadata == {"need": "3", "actual_length": "7"}
    if isinstance(received, errors.PoolExhausted):
        assert received.retry_after == 0.75
    if isinstance(received, errors.ContextMoved):
        assert received.actual_length == 7


def test_violations_survive_the_wire() -> None:
    """Catches a bad request that does not say which field is bad."""
    error = errors.InvalidRequest("No.", violations={"sampling.top_p": "must be in (0, 1]"})
    assert over_the_wire(error).violations == {"sampling.top_p": "must be in (0, 1]"}


@pytest.mark.parametrize("letter", ["x", "ä", "\ud800"])
def test_a_status_stays_small(letter: str) -> None:
    """Catches details over gRPC's metadata limit: the client would lose the whole error."""
    error = errors.InvalidRequest(
        letter * 50_000,
        metadata={f"{number}{letter * 100}": letter * 5_000 for number in range(100)},
        violations={f"{number}{letter * 500}": letter * 5_000 for number in range(1000)},
    )
    sent = status.to_status(error)
    assert sent.ByteSize() < 8_000
    assert 0 < len(over_the_wire(error).violations) <= 32


def test_short_violations_are_listed_up_to_the_cap() -> None:
    """Catches a cap that is lower, or higher, than what clients are told."""
    error = errors.InvalidRequest(
        "No.", violations={f"continuations[{number}]": "must not be empty" for number in range(99)}
    )
    assert len(over_the_wire(error).violations) == 32


def test_each_detail_comes_once_and_quota_names_the_tenant() -> None:
    """Catches a doubled detail type, which clients of other languages reject."""
    error = errors.PoolExhausted("Full.", reason=Reason.TENANT_QUOTA, retry_after=1.0)
    types = [detail.TypeName() for detail in status.to_status(error).details]
    assert types == ["google.rpc.ErrorInfo", "google.rpc.RetryInfo", "google.rpc.QuotaFailure"]


def test_retry_hint_is_told_to_grpc_as_well() -> None:
    """Catches a hint only in RetryInfo, which gRPC's own retries do not read."""
    full = errors.PoolExhausted("Full.", retry_after=0.7)
    assert (status.PUSHBACK_KEY, "700") in status.trailing_metadata(full)
    lost = errors.ContextLost("Gone.")
    assert (status.PUSHBACK_KEY, "-1") in status.trailing_metadata(lost)
    down = errors.Unavailable("Draining.")
    assert status.PUSHBACK_KEY not in dict(status.trailing_metadata(down))


@pytest.mark.parametrize(
    "code", [code for code in grpc.StatusCode if code is not grpc.StatusCode.OK]
)
def test_plain_codes_become_exceptions_without_a_reason(code: grpc.StatusCode) -> None:
    """Catches a gRPC failure shown with a cause that nobody stated."""
    received = status.from_rpc_error(FailedCall(code, "plain"), request_id="r1")
    assert type(received) is status.WITHOUT_REASON.get(code, errors.InternalError)
    assert received.reason is None
    assert received.message == "plain"
    assert received.request_id == "r1"


@pytest.mark.parametrize("class_", [errors.DeadlineExceeded, errors.Cancelled])
def test_errors_without_a_reason_keep_their_code(class_: type[AgentKVError]) -> None:
    """Catches a deadline that the server reports as a fault of its own."""
    received = over_the_wire(class_("Late."))
    assert type(received) is class_
    assert received.reason is None


def test_a_reason_of_a_newer_server_falls_back_on_the_code() -> None:
    """Catches a client that breaks when the server learns a reason."""
    sent = status.to_status(errors.ContextBusy("Wait."))
    del sent.details[:]
    sent.details.add().Pack(details_pb2.ErrorInfo(reason="NEW_REASON", domain=status.DOMAIN))
    received = status.from_rpc_error(
        FailedCall(
            grpc.StatusCode.ABORTED,
            "Wait.",
            (("grpc-status-details-bin", sent.SerializeToString()),),
        )
    )
    assert isinstance(received, errors.ContextBusy)
    assert received.reason is None
    assert received.metadata == {"reason": "NEW_REASON"}


def test_damaged_details_do_not_hide_the_failure() -> None:
    """Catches a decode error raised in place of the call's own failure."""
    received = status.from_rpc_error(
        FailedCall(grpc.StatusCode.UNAVAILABLE, "down", (("grpc-status-details-bin", b"\xff\xff"),))
    )
    assert isinstance(received, errors.Unavailable)
    assert received.message == "down"
