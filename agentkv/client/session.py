"""What the handles of one client share: settings, totals, and the contexts to release.

It owns the calls that need no handle. It does no input or output: its operations are run by the
client's driver.
"""

import threading
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final

from google.protobuf.message import Message

from agentkv.client import messages, replies
from agentkv.client.lineage import Lineage
from agentkv.client.operation import Call, Deadline, Operation
from agentkv.client.retry import NO_RETRY, Attempts, RetryPolicy
from agentkv.client.server_info import ServerInfo
from agentkv.client.usage_info import UsageInfo
from agentkv.client.values import ContextInfo, PoolInfo, Released, Usage
from agentkv.errors import ContextLost, NotFound
from agentkv.v1 import agentkv_pb2 as pb

MAX_RELEASE: Final = 1_000
"""Contexts released by one call; below what any server allows."""


class Session:
    """The state of one client. Its totals may be counted by several threads.

    Args:
        timeout: Seconds for a call that names none.
        retry: When to repeat calls that may be repeated; None for never.
        clock: Monotonic seconds.
        make_id: Draws a request id.
    """

    def __init__(
        self,
        *,
        timeout: float,
        retry: RetryPolicy | None,
        clock: Callable[[], float] = time.monotonic,
        make_id: Callable[[], str] = lambda: str(uuid.uuid4()),
    ) -> None:
        Deadline(timeout, clock)  # refuses a default that every call would refuse
        self._timeout = timeout
        self._retry = retry or NO_RETRY
        self._clock = clock
        self._lock = threading.Lock()
        self.make_id = make_id
        self.lineage = Lineage("", is_owned=False)
        self.usage = Usage()
        """Tokens over all replies so far."""
        self.pool: PoolInfo | None = None
        """The pool as the last reply that told of it showed it."""

    def attempts(self, timeout: float | None, *, may_repeat: bool = True) -> Attempts:
        """Begins a logical call."""
        deadline = Deadline(self._timeout if timeout is None else timeout, self._clock)
        return Attempts(self._retry if may_repeat else NO_RETRY, deadline)

    def send(
        self, method: str, request: Message, attempts: Attempts, request_id: str | None = None
    ) -> Operation[Any]:
        """Sends a call until it is answered."""
        call = Call(method, request, 0.0, request_id)

        def attempt(remaining: float) -> Operation[Any]:
            return (yield replace(call, timeout=remaining))

        return (yield from attempts.run(attempt))

    def see(self, reply: Any) -> Usage:
        """Counts the usage of a reply, and keeps its view of the pool.

        Args:
            reply: Any message with a `usage`, a `pool`, or both.
        """
        names = reply.DESCRIPTOR.fields_by_name
        usage = replies.usage(reply.usage) if "usage" in names else Usage()
        with self._lock:
            self.usage += usage
            if "pool" in names and reply.HasField("pool"):
                self.pool = replies.pool(reply.pool)
        return usage

    def get(self, context_id: str, attempts: Attempts) -> Operation[ContextInfo]:
        """Describes one context."""
        reply = yield from self.send("Get", messages.get(context_id), attempts)
        return replies.context(reply.context)

    def list_page(
        self, root_id: str | None, page_size: int | None, page_token: str, timeout: float | None
    ) -> Operation[tuple[Sequence[ContextInfo], str]]:
        """Lists one page of contexts, with the token of the next: empty after the last."""
        request = messages.list_page(root_id, page_size, page_token)
        reply = yield from self.send("List", request, self.attempts(timeout))
        return [replies.context(item) for item in reply.contexts], reply.next_page_token

    def usage_of(
        self, context_id: str | None, root_id: str | None, timeout: float | None
    ) -> Operation[UsageInfo]:
        """Asks what a context, a tree, or else every context of the caller has used."""
        request = messages.get_usage(context_id, root_id)
        reply = yield from self.send("GetUsage", request, self.attempts(timeout))
        return replies.usage_info(reply)

    def server_info(self, timeout: float | None) -> Operation[ServerInfo]:
        """Describes the server."""
        reply = yield from self.send(
            "GetServerInfo", pb.GetServerInfoRequest(), self.attempts(timeout)
        )
        self.see(reply)
        return replies.server_info(reply)

    def release(
        self, nodes: Sequence[Lineage], *, recursive: bool = False, timeout: float | None = None
    ) -> Operation[Released]:
        """Releases contexts in the order given; one that is gone already is passed over."""
        attempts, total = self.attempts(timeout), Released()
        for start in range(0, len(nodes), MAX_RELEASE):
            batch = nodes[start : start + MAX_RELEASE]
            request = pb.ReleaseRequest(
                context_ids=[node.id for node in batch], recursive=recursive, allow_missing=True
            )
            reply = yield from self.send("Release", request, attempts)
            self.see(reply)
            total += replies.released(reply)
            for node in batch:
                node.release()
        return total

    def leave(self, nodes: Sequence[Lineage]) -> Operation[Released]:
        """Releases at the end of a `with`: what is gone already is what was wanted."""
        try:
            return (yield from self.release(nodes))
        except (NotFound, ContextLost):
            for node in nodes:
                node.release()
            return Released()
