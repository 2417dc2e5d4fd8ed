"""Who runs and who waits, and what each move does to how firmly a context is kept."""

import bisect
from collections import Counter

from agentkv.core.context_store import ContextStore
from agentkv.core.fair_order import FairOrder
from agentkv.core.request import Request, RequestStatus
from agentkv.core.segment import Hold


class RequestQueues:
    """The scheduler's two lists, and the order in which those that wait are served.

    Invariants: a request is in exactly one list, or done; both are in order of arrival; a running
    request's context is held firmly, a preempted one's by its tokens alone, and any other as its
    lease says; at most one request per context.
    """

    def __init__(self, store: ContextStore) -> None:
        self.running: list[Request] = []
        self.waiting: list[Request] = []
        self.num_preemptions = 0
        self.fair = FairOrder()
        self.num_running_of: Counter[str] = Counter()
        """Running requests of each tenant."""
        self._store = store

    def enqueue(self, request: Request) -> None:
        """Lets a new request wait."""
        assert request.context.request is None
        request.context.request = request
        self.waiting.append(request)
        self.fair.enter(request)
        self.fair.wait(request)

    def start(self, request: Request) -> None:
        """Lets a waiting request run."""
        self.waiting.remove(request)
        self.fair.unwait(request)
        self.num_running_of[request.context.tenant] += 1
        bisect.insort(self.running, request, key=lambda other: other.id)
        request.status = RequestStatus.RUNNING
        self._hold(request, Hold.FIRM)

    def preempt(self, request: Request) -> None:
        """Sends a running request back to wait; its KV may go, and is recomputed if it does."""
        self._stop(request)
        bisect.insort(self.waiting, request, key=lambda other: other.id)
        self.fair.wait(request)
        request.status, request.num_promised = RequestStatus.WAITING, 0
        if request.context.is_pinned:
            self._hold(request, Hold.PINNED)
        else:
            self._store.give_way(request.context)
        self.num_preemptions += 1

    def finish(self, request: Request) -> None:
        """Ends a request: its context stays at its last committed token, as an idle one."""
        if request.is_running:
            self._stop(request)
        else:
            self.waiting.remove(request)
            self.fair.unwait(request)
        self.fair.leave(request)
        context = request.context
        request.status, context.request = RequestStatus.DONE, None
        if context.tail.end > context.length:
            self._store.truncate(context, context.length)
        self._store.settle(context)

    def _stop(self, request: Request) -> None:
        self.running.remove(request)
        tenant = request.context.tenant
        self.num_running_of[tenant] -= 1
        if not self.num_running_of[tenant]:
            del self.num_running_of[tenant]

    def _hold(self, request: Request, hold: Hold) -> None:
        context = request.context
        self._store.set_hold(context, Hold.PINNED if context.is_pinned else hold)
