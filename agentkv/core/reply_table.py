"""Answers by request id, so that a repeated Create or Fork is one execution and one answer.

Source: AIP-155 (request identification).
"""

import hashlib
from collections import OrderedDict
from typing import NamedTuple

from agentkv.errors import InvalidRequest, Reason


class _Reply(NamedTuple):
    fingerprint: bytes
    answer: object
    expire_time: float


class ReplyTable:
    """A bounded table (tenant, method, request id) -> answer; answers expire after a while."""

    def __init__(self, capacity: int, ttl: float) -> None:
        self._capacity = capacity
        self._ttl = ttl
        self._replies: OrderedDict[tuple[str, str, str], _Reply] = OrderedDict()

    def __len__(self) -> int:
        return len(self._replies)

    def find(
        self, tenant: str, method: str, request_id: str | None, body: object, now: float
    ) -> object | None:
        """Finds the answer to an earlier call with this id; None when there is none.

        Raises:
            InvalidRequest: The id was used with another body.
        """
        self._expire(now)
        if request_id is None:
            return None
        reply = self._replies.get((tenant, method, request_id))
        if reply is None:
            return None
        if reply.fingerprint != _fingerprint(body):
            raise InvalidRequest(
                "This request_id was used for a different request; use a new one.",
                reason=Reason.REQUEST_ID_REUSED,
                request_id=request_id,
            )
        return reply.answer

    def record(
        self,
        tenant: str,
        method: str,
        request_id: str | None,
        body: object,
        answer: object,
        now: float,
    ) -> None:
        """Remembers an answer; without a request id there is nothing to remember."""
        if request_id is None:
            return
        key = tenant, method, request_id
        self._replies[key] = _Reply(_fingerprint(body), answer, now + self._ttl)
        self._replies.move_to_end(key)  # the order of the table is that of expiry
        while len(self._replies) > self._capacity:
            self._replies.popitem(last=False)

    def holds(self, answer: object) -> bool:
        """Whether a repeat of some call would get this very answer; costs a look at all."""
        return any(reply.answer is answer for reply in self._replies.values())

    def _expire(self, now: float) -> None:
        while self._replies:
            key, reply = next(iter(self._replies.items()))
            if reply.expire_time > now:
                return
            del self._replies[key]


def _fingerprint(body: object) -> bytes:
    """Stands for a call's arguments, plain values whose text tells them apart, in little memory."""
    return hashlib.sha256(repr(body).encode()).digest()
