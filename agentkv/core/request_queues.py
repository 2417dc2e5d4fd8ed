"""Who runs and who waits, and what each move does to how firmly a context is kept."""

import bisect

from agentkv.core.context_store import ContextStore
from agentkv.core.request import Request, RequestStatus
from agentkv.core.segment import Hold


class RequestQueues:
    """The scheduler's two lists.

    Invariants: a request is in exactly one list, or done; both are in order of arrival; a running
    request's context is held firmly, a preempted one's by its tokens alone, and any other as its
    lease says; at most one request per context.
    """

    def __init__(self, store: ContextStore) -> None:
        self.running: list[Request] = []
        self.waiting: list[Request] = []
        self.num_preemptions = 0
        self._store = store

    def enqueue(self, request: Request) -> None:
        """Lets a new request wait."""
        assert request.context.request is None
        request.context.request = request
        self.waiting.append(request)

    def start(self, request: Request) -> None:
        """Lets the first waiting request run."""
        assert self.waiting[0] is request
        del self.waiting[0]
        bisect.insort(self.running, request, key=lambda other: other.id)
        request.status = RequestStatus.RUNNING
        self._hold(request, Hold.FIRM)

    def preempt(self, request: Request) -> None:
        """Sends a running request back to wait; its KV may go, and is recomputed if it does."""
        self.running.remove(request)
        bisect.insort(self.waiting, request, key=lambda other: other.id)
        request.status, request.num_promised = RequestStatus.WAITING, 0
        self._hold(request, Hold.TOKENS)
        self.num_preemptions += 1

    def finish(self, request: Request) -> None:
        """Ends a request: its context stays at its last committed token, as an idle one."""
        queue = self.running if request.status is RequestStatus.RUNNING else self.waiting
        queue.remove(request)
        context = request.context
        request.status, context.request = RequestStatus.DONE, None
        if context.tail.end > context.length:
            self._store.truncate(context, context.length)
        self._store.set_hold(context, context.idle_hold)
        self._store.touch(context)

    def _hold(self, request: Request, hold: Hold) -> None:
        context = request.context
        self._store.set_hold(context, Hold.PINNED if context.is_pinned else hold)
