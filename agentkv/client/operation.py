"""How the SDK says what to do without doing it: operations that yield steps.

An operation is a generator. It yields a `Step`, is sent what the step gave or thrown what it
raised, and returns its result. The blocking and the asyncio client run the same operations, each
with a driver of its own (`agentkv.client.drive`), so no rule of the wire is written twice.
"""

import math
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

from google.protobuf.message import Message

from agentkv.errors import InvalidRequest

ResultT = TypeVar("ResultT")


@dataclass(frozen=True, slots=True)
class Call:
    """One attempt of a call."""

    method: str
    """Name of the method, such as `Fork`."""
    request: Message
    timeout: float
    """Seconds after which it fails with DeadlineExceeded."""
    request_id: str | None = None
    """The id in the request, if it has one: shown on the exception."""


@dataclass(frozen=True, slots=True)
class Read:
    """The next message of a stream, or None at its end."""

    stream: Any
    """What the transport's `stream` returned."""


@dataclass(frozen=True, slots=True)
class Wait:
    """A pause."""

    seconds: float


Step: TypeAlias = Call | Read | Wait
Operation: TypeAlias = Generator[Step, Any, ResultT]


class Deadline:
    """The end of one logical call: retries and the waits between them count.

    Args:
        seconds: Time from now, above 0.
        clock: Monotonic seconds.

    Raises:
        InvalidRequest: `seconds` is not a positive, finite number.
    """

    def __init__(self, seconds: float, clock: Callable[[], float]) -> None:
        if not (math.isfinite(seconds) and seconds > 0):
            raise InvalidRequest(f"timeout must be a finite number above 0, got {seconds}.")
        self._clock = clock
        self._end = clock() + seconds

    def remaining(self) -> float:
        """Returns the seconds left, at least 0."""
        return max(0.0, self._end - self._clock())
