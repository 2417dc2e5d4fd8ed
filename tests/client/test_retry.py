"""What is sent again, when, and what is not; lost answers included."""

from typing import Any

import pytest
from client.fake_service import FakeService, Fault, serving

from agentkv import (
    Client,
    ContextBusy,
    ContextLost,
    ContextMoved,
    DeadlineExceeded,
    InvalidRequest,
    PoolExhausted,
    RetryPolicy,
    Unavailable,
    Usage,
)
from agentkv.client.operation import Deadline, Operation, Wait
from agentkv.client.retry import Attempts
from agentkv.errors import AgentKVError
from agentkv.status import PUSHBACK_KEY

STEADY = RetryPolicy(jitter=lambda: 1.0)


def down(is_late: bool = False) -> Fault:
    return Fault(Unavailable("down"), is_late=is_late)


# -- the policy ------------------------------------------------------------------------------


def test_waits_double_up_to_the_longest() -> None:
    """Catches a back-off that never grows, or grows for ever."""
    policy = RetryPolicy(max_attempts=9, jitter=lambda: 1.0)
    waits = [policy.wait_after(attempt, Unavailable("down")) for attempt in range(1, 10)]
    assert waits == [0.5, 1.0, 2.0, 4.0, 8.0, 8.0, 8.0, 8.0, None]
    assert RetryPolicy(jitter=lambda: 0.0).wait_after(1, Unavailable("down")) == 0.25


@pytest.mark.parametrize(
    ("pushback", "wait"), [("700", 0.7), ("0", 0.0), ("-1", None), ("soon", None), ("60000", None)]
)
def test_the_servers_wait_is_obeyed(pushback: str, wait: float | None) -> None:
    """Catches a client that comes back earlier than it was told, or although told not to."""
    error = Unavailable("down", metadata={PUSHBACK_KEY: pushback})
    assert STEADY.wait_after(1, error) == wait


def test_only_what_may_pass_is_retried() -> None:
    """Catches a retry of an error that the same call meets again."""
    for error in (
        InvalidRequest("No."),
        ContextLost("Gone."),
        ContextMoved("Moved.", metadata={"actual_length": 1}),
        DeadlineExceeded("Late."),
        ContextBusy("Busy."),
        PoolExhausted("Full.", retry_after=0.1),
    ):
        assert STEADY.wait_after(1, error) is None
    assert STEADY.wait_after(1, ContextBusy("Busy."), maybe_running=True) == 0.5


def test_a_full_pool_is_waited_for_when_asked() -> None:
    """Catches a wait for blocks that no waiting brings."""
    patient = RetryPolicy(when_full=True)
    assert patient.wait_after(1, PoolExhausted("Full.", retry_after=0.3)) == 0.3
    assert patient.wait_after(1, PoolExhausted("Too long.")) is None


@pytest.mark.parametrize(
    "numbers", [{"max_attempts": 0}, {"first_backoff": -1.0}, {"first_backoff": 9.0}]
)
def test_policies_out_of_range_are_refused(numbers: dict[str, Any]) -> None:
    """Catches a policy that makes no attempt, or waits a negative time."""
    with pytest.raises(InvalidRequest):
        RetryPolicy(**numbers)


class Clock:
    """Time that passes when told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def failing(error: AgentKVError, remaining: list[float]) -> "Operation[None]":
    """Attempts that fail for ever, noting the time each was given."""

    def attempt(seconds: float) -> Operation[None]:
        remaining.append(seconds)
        raise error
        yield

    clock = Clock()
    attempts = Attempts(STEADY, Deadline(3.0, clock))
    operation = attempts.run(attempt)
    while True:
        step = next(operation)
        assert isinstance(step, Wait)
        clock.now += step.seconds
        yield step


def test_a_deadline_covers_all_attempts() -> None:
    """Catches a call that takes its time-out once for each attempt."""
    remaining: list[float] = []
    with pytest.raises(Unavailable) as caught:
        list(failing(Unavailable("down"), remaining))
    assert remaining == [3.0, 2.5, 1.5]  # a third wait, of 2 s, would end after the deadline
    assert "may have been carried out" in caught.value.__notes__[0]


# -- over a real connection ------------------------------------------------------------------


@pytest.mark.parametrize("is_late", [False, True])
def test_create_is_repeated_with_the_same_id(
    client: Client, service: FakeService, is_late: bool
) -> None:
    """Catches a lost answer that leaves a context behind which nobody releases."""
    service.faults["Create"].extend([down(is_late), down(is_late)])
    root = client.create("abc")
    assert list(service.contexts) == [root.id]
    assert len({request.request_id for request in service.requests("Create")}) == 1
    assert client.create("abc").id != root.id


def test_fork_is_repeated_with_the_same_id(client: Client, service: FakeService) -> None:
    """Catches a lost answer that leaves branches behind."""
    root = client.create("abc")
    service.faults["Fork"].append(down(is_late=True))
    branches = root.fork(3)
    assert set(service.contexts) == {root.id, *(branch.id for branch in branches)}


def test_extend_repeats_a_call_that_was_not_carried_out(
    client: Client, service: FakeService
) -> None:
    """Catches an append that is lost, or done twice."""
    root = client.create("abc")
    service.faults["Extend"].append(down())
    assert root.extend("de").length == 5
    assert bytes(service.contexts[root.id].tokens) == b"abcde"


def test_extend_of_ids_recognises_its_own_lost_success(
    client: Client, service: FakeService
) -> None:
    """Catches tokens appended twice, or an error for a call that did all it should."""
    root = client.create("abc")
    service.faults["Extend"].append(down(is_late=True))
    extension = root.extend(token_ids=[100, 101])
    assert (extension.length, extension.usage) == (5, Usage())
    assert bytes(service.contexts[root.id].tokens) == b"abcde"
    assert root.info.length == root.extend("f").length - 1 == 5


@pytest.mark.parametrize("tokens", [{"text": "d"}, {"token_ids": [100], "logprobs": True}])
def test_extend_says_when_it_cannot_know(
    client: Client, service: FakeService, tokens: dict[str, Any]
) -> None:
    """Catches a success claimed for a text of unknown length, or with its answer missing."""
    root = client.create("abc")
    service.faults["Extend"].append(down(is_late=True))
    with pytest.raises(ContextMoved) as caught:
        root.extend(**tokens)
    assert "may have been carried out" in caught.value.__notes__[0]
    assert root.refresh().length == 4


def test_extend_does_not_take_anothers_tokens_for_its_own(
    client: Client, service: FakeService
) -> None:
    """Catches a context moved by someone else that passes for success."""
    root = client.create("abc")
    client.attach(root.id).extend("d")
    with pytest.raises(ContextMoved):  # at the expected length, but nothing was repeated
        root.extend(token_ids=[100])
    root.refresh()
    service.faults["Extend"].append(down(is_late=True))
    service.contexts[root.id].tokens.append(1)
    with pytest.raises(ContextMoved):
        root.extend(token_ids=[100])
    root.refresh()
    service.faults["Extend"].append(down())
    service.contexts[root.id].tokens.append(1)
    with pytest.raises(ContextMoved):  # repeated, at the expected length, but other tokens
        root.extend(token_ids=[100])


def test_truncate_recognises_its_own_lost_success(client: Client, service: FakeService) -> None:
    """Catches an error for a call that did all it should."""
    root = client.create("abcdef")
    service.faults["Truncate"].append(down(is_late=True))
    assert root.truncate(2).length == root.length == 2
    client.attach(root.id).truncate(1)
    with pytest.raises(ContextMoved):
        root.truncate(1)


def test_generate_is_repeated_before_its_first_message(
    client: Client, service: FakeService
) -> None:
    """Catches a search that dies of one lost connection."""
    root = client.create("abc")
    service.faults["Generate"].extend([down(), down()])
    assert root.complete(max_tokens=2).text == "de"
    assert len(service.requests("Generate")) == 3


def test_an_own_earlier_attempt_may_keep_the_context_busy(
    client: Client, service: FakeService
) -> None:
    """Catches a repeat refused because of the attempt it repeats."""
    root = client.create("abc")
    service.faults["Generate"].extend([down(), Fault(ContextBusy("Busy."))])
    assert root.complete(max_tokens=1).text == "d"
    service.faults["Generate"].append(Fault(ContextBusy("Busy.")))
    with pytest.raises(ContextBusy):
        root.complete(max_tokens=1)


def test_observers_and_release_are_repeated(client: Client, service: FakeService) -> None:
    """Catches a harmless call that is not retried."""
    root = client.create("abc")
    for method in ("Get", "List", "Score", "GetServerInfo", "Release"):
        service.faults[method].append(down(is_late=True))
    root.refresh()
    assert len(list(client.list())) == 1
    root.score(["x"])
    client.server_info()
    root.release()
    assert len(service.calls) == 11


def test_a_lost_context_is_not_asked_for_again(client: Client, service: FakeService) -> None:
    """Catches retries of UNAVAILABLE that carries the order not to retry."""
    root = client.create("abc")
    service.faults["Get"].append(Fault(ContextLost("The replica is gone.")))
    with pytest.raises(ContextLost):
        root.refresh()
    assert len(service.requests("Get")) == 1


def test_retries_can_be_turned_off(address: str, service: FakeService) -> None:
    """Catches a caller's own retries multiplied by ours."""
    service.faults["Create"].append(down())
    with Client(address, retry=None) as client, pytest.raises(Unavailable):
        client.create("abc")
    assert len(service.requests("Create")) == 1


def test_a_server_that_is_not_there_is_unavailable() -> None:
    """Catches a connection failure that surfaces as gRPC's own exception, or never."""
    with serving(FakeService()) as address:
        pass
    policy = RetryPolicy(max_attempts=2, first_backoff=0.0)
    with Client(address, retry=policy) as client, pytest.raises(Unavailable) as caught:
        client.create("abc")
    assert caught.value.reason is None
