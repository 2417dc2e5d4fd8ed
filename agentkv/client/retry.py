"""When a failed call is sent again, and after how long.

It owns that decision and nothing else. That a repeat is safe is the caller's business: a
`request_id` for Create and Fork, an `expected_length` for Extend, Generate and Truncate.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass

from agentkv.client.operation import Deadline, Operation, ResultT, Wait
from agentkv.errors import (
    AgentKVError,
    ContextBusy,
    InvalidRequest,
    PoolExhausted,
    Unavailable,
)
from agentkv.status import PUSHBACK_KEY


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """How often, and how patiently, a call that may be repeated is repeated.

    Unavailable is retried after a wait that doubles each time; a server that names a wait itself
    is obeyed. Everything else is raised at once.

    Raises:
        InvalidRequest: A number is out of range.
    """

    max_attempts: int = 4
    """Most attempts of one call, the first included, at least 1."""
    first_backoff: float = 0.5
    """Seconds before the second attempt, at most; half of it at least."""
    max_backoff: float = 8.0
    """Longest wait between two attempts, in seconds, whatever the server asks for."""
    when_full: bool = False
    """Whether to wait for blocks or a place in the queue too, when the server says how long."""
    jitter: Callable[[], float] = random.random
    """Draws a number in [0, 1), so that clients that failed together do not return together."""

    def __post_init__(self) -> None:
        if self.max_attempts < 1 or not 0 <= self.first_backoff <= self.max_backoff:
            raise InvalidRequest(
                "RetryPolicy needs max_attempts >= 1 and 0 <= first_backoff <= max_backoff."
            )

    def wait_after(
        self, attempt: int, error: AgentKVError, *, maybe_running: bool = False
    ) -> float | None:
        """Returns the seconds to wait before the next attempt; None when there is to be none.

        Args:
            attempt: Number of the attempt that failed, from 1.
            error: What it failed with.
            maybe_running: Whether an earlier attempt may still run on the server: then it, and
                nobody else, may be what makes the context busy.
        """
        if attempt >= self.max_attempts or not self._is_worth_it(error, maybe_running):
            return None
        if (asked := _asked_wait(error)) is not None:
            return asked if 0 <= asked <= self.max_backoff else None
        backoff = min(self.max_backoff, self.first_backoff * 2.0 ** (attempt - 1))
        return backoff * (0.5 + 0.5 * self.jitter())

    def _is_worth_it(self, error: AgentKVError, maybe_running: bool) -> bool:
        if isinstance(error, PoolExhausted):
            return self.when_full and error.retry_after is not None
        return isinstance(error, Unavailable) or (maybe_running and isinstance(error, ContextBusy))


DEFAULT_RETRY = RetryPolicy()
NO_RETRY = RetryPolicy(max_attempts=1)


class Attempts:
    """The attempts of one logical call, under one deadline."""

    def __init__(self, policy: RetryPolicy, deadline: Deadline) -> None:
        self._policy = policy
        self._deadline = deadline
        self.maybe_done = False
        """Whether an attempt failed in a way that leaves open whether the server did its work."""

    def remaining(self) -> float:
        """Returns the seconds left to the call, at least 0."""
        return self._deadline.remaining()

    def run(self, attempt: Callable[[float], Operation[ResultT]]) -> Operation[ResultT]:
        """Makes attempts until one succeeds, or the policy or the deadline ends them.

        Args:
            attempt: Makes one, given the seconds that are left.
        """
        number = 0
        while True:
            number += 1
            try:
                return (yield from attempt(self._deadline.remaining()))
            except AgentKVError as error:
                wait = self._policy.wait_after(number, error, maybe_running=self.maybe_done)
                if wait is None or wait >= self._deadline.remaining():
                    if self.maybe_done:
                        error.add_note("An earlier attempt of this call may have been carried out.")
                    raise
                self.maybe_done = self.maybe_done or isinstance(error, Unavailable)
            yield Wait(wait)


def _asked_wait(error: AgentKVError) -> float | None:
    """Reads the wait a server asks for; negative when it asks not to be tried again."""
    if isinstance(error, PoolExhausted):
        return error.retry_after
    if (pushback := error.metadata.get(PUSHBACK_KEY)) is None:
        return None
    # gRPC's own rule: a value that is no number means, like a negative one, do not retry.
    return int(pushback) / 1000 if pushback.isdecimal() else -1.0
