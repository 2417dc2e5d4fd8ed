"""Plans one step: which rows of which request, on which blocks.

Decode rows come first in the budget, so that a prompt never keeps a running branch from its next
token; what is left goes to chunks, oldest request first, then to requests that wait.
"""

from agentkv.config import SchedulerConfig
from agentkv.core.admission import Admission
from agentkv.core.batch_builder import Work
from agentkv.core.block_move import Tier
from agentkv.core.block_writes import apply_writes, plan_writes, settle
from agentkv.core.context_tree import ContextTree
from agentkv.core.eviction import bring_back
from agentkv.core.request import Event, FinishReason, Request, RequestStatus
from agentkv.core.request_queues import RequestQueues
from agentkv.core.segment import Hold, Segment
from agentkv.errors import PoolExhausted


class StepPlanner:
    """The growing plan of one step; used once.

    Two requests never write one segment in a step: a sibling that needs nothing but the last row
    of another's work shares that row; one that needs more waits for the next step.
    """

    def __init__(
        self,
        tree: ContextTree,
        queues: RequestQueues,
        admission: Admission,
        config: SchedulerConfig,
    ) -> None:
        self.works: list[Work] = []
        self.refused: list[Event] = []
        self.is_fetching = False
        """Whether somebody waits for KV to be read from disk."""
        self._tree = tree
        self._queues = queues
        self._admission = admission
        self._config = config
        self._writers: list[Work] = []
        num_decodes = sum(self._num_missing(request) <= 1 for request in queues.running)
        self._chunk_budget = max(0, config.token_budget - num_decodes)

    def place_running(self) -> None:
        """Gives rows to the requests that run already, oldest first."""
        for request in list(self._queues.running):
            if request.status is RequestStatus.RUNNING:  # an older one may have preempted it
                self._place(request)

    def admit_waiting(self) -> None:
        """Starts waiting requests in order of arrival while blocks and budget allow."""
        queues = self._queues
        max_running = min(self._config.max_running, self._config.token_budget)
        while queues.waiting and len(queues.running) < max_running and self._chunk_budget > 0:
            request = queues.waiting[0]
            try:
                self._admission.require_possible(request)
            except PoolExhausted as error:
                self._refuse(request, error)
                continue
            if not self._admission.may_start(request):
                return
            queues.start(request)
            self._chunk_budget -= self._num_missing(request) <= 1
            self._place(request)

    def _place(self, request: Request) -> None:
        tail = request.context.tail
        sibling = self._sibling(tail)
        if sibling is not None:
            if self._may_share(request, sibling):
                self._add(Work(request, tail.end, tail.end, shared=sibling), 0)
            return
        settle(self._tree, tail)
        if not self._is_fetched(request):
            return
        first = self._first_row(request)
        num_rows = request.target - first
        if num_rows > 1:
            num_rows = min(num_rows, self._config.chunk_size, self._chunk_budget)
            self._chunk_budget -= num_rows
            if num_rows == 0:
                return
        if not self._reserve(request, max(first + num_rows, self._tree.num_kept(tail))):
            return
        num_free = self._tree.pool.num_free
        bring_back(self._tree, tail)
        copies = apply_writes(self._tree, plan_writes(self._tree, tail, first + num_rows))
        num_taken = num_free - self._tree.pool.num_free
        self._add(Work(request, first, first + num_rows, tuple(copies)), num_taken)

    def _is_fetched(self, request: Request) -> bool:
        """Whether nothing of a request's path has to be read from disk first.

        Until then the request runs without rows: its blocks are promised, and what it has in lower
        tiers stays there.
        """
        lower = self._tree.lower
        if not lower.pools[Tier.DISK].num_blocks:
            return True
        path = self._tree.path(request.context.tail)
        is_fetched = lower.fetch(place for segment in path for place in segment.away)
        self.is_fetching |= not is_fetched
        return is_fetched

    def _add(self, work: Work, num_blocks: int) -> None:
        request, tail = work.request, work.request.context.tail
        is_complete = work.upto == request.target
        work.samples = is_complete and request.params is not None
        work.keeps_head = (
            is_complete
            and request.is_continued
            and (work.num_rows > 0 or work.shared is not None)
            and (request.params is None or tail.num_contexts > 1)
        )
        if work.num_rows:
            self._writers.append(work)
        request.num_promised -= min(request.num_promised, num_blocks)
        if is_complete:
            request.num_promised = 0
        if request.cached_tokens is None:
            request.cached_tokens = work.first
        self.works.append(work)

    def _reserve(self, request: Request, upto: int) -> bool:
        """Makes room for the KV of a path up to a position; False when the request has to wait."""
        while True:
            writes = plan_writes(self._tree, request.context.tail, upto)
            if writes.num_blocks <= self._tree.pool.num_free:
                return True
            if self._admission.make_room(writes.num_blocks):
                continue
            try:
                has_forgone_copy = self._admission.require_possible(request)
            except PoolExhausted as error:
                self._refuse(request, error)
                return False
            victim = self._youngest_after(request) or request
            if has_forgone_copy:  # its rows begin earlier now: start over
                victim = request
            self._queues.preempt(victim)
            if victim is request:
                return False

    def _youngest_after(self, request: Request) -> Request | None:
        """Finds the youngest running request that can give way to this one in this step."""
        placed = {work.request for work in self.works}
        younger = (
            other
            for other in reversed(self._queues.running)
            if other.id > request.id and other not in placed and not other.context.is_pinned
        )
        return next(younger, None)

    def _refuse(self, request: Request, error: PoolExhausted) -> None:
        self._queues.finish(request)
        self.refused.append(Event(request, finish=FinishReason.ERROR, error=error))

    def _num_missing(self, request: Request) -> int:
        return request.target - self._first_row(request)

    def _first_row(self, request: Request) -> int:
        """Finds the position from which a request needs rows; its end when it needs none.

        What is in a lower tier needs none: it is brought back before the rows are run.
        """
        tail = request.context.tail
        first = self._tree.num_kept(tail)
        if request.first_scored_row is not None:
            first = min(first, request.first_scored_row)
        if first == tail.end and tail not in self._tree.heads:
            first -= 1  # KV is there and logits are not: run the last token again, without a write
        return first

    def _sibling(self, tail: Segment) -> Work | None:
        """Finds work of this step that computes what a path lacks, or part of it."""
        missing = node = tail
        while node.parent is not None and not node.is_computed:
            missing, node = node, node.parent
        if missing.holds[Hold.TOKENS] == 1:  # no other path runs through it
            return None
        for work in self._writers:
            end = work.request.context.tail
            if end is tail and work.upto == tail.end:
                return work
            while end.start > missing.start:
                assert end.parent is not None
                end = end.parent
            if end is missing and missing.num_computed < min(work.upto, missing.end):
                return work
        return None

    def _may_share(self, request: Request, work: Work) -> bool:
        tail = request.context.tail
        is_same_end = work.request.context.tail is tail and work.upto == tail.end
        return is_same_end and request.next_scored is None
