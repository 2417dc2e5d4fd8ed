"""Plans one step: which rows of which request, on which blocks.

Decode rows come first in the budget, so that a prompt never keeps a running branch from its next
token; what is left goes to chunks and to requests that wait, in fair order over tenants and their
trees. Blocks are taken oldest request first, and only younger ones give way: so the oldest always
ends, and with it, one after the other, all.
"""

from collections.abc import Sequence

from agentkv.config import SchedulerConfig
from agentkv.core.admission import Admission, Wait
from agentkv.core.batch_builder import Work
from agentkv.core.block_move import Tier
from agentkv.core.block_writes import BlockWrites, apply_writes, plan_writes, settle
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
        self._max_running = min(config.max_running, config.token_budget)
        self._chunk_budget = 0

    def make_way(self) -> None:
        """Lets a tenant that has nothing running begin, if another one has more than one.

        The youngest of who has most give way. A tenant's only request never does, and neither does
        the oldest request of all, so this cannot go round in circles: a request that was let in
        here runs until an older one needs its blocks, and then there are fewer of those.
        """
        queues = self._queues
        if not queues.running:
            return  # nobody is in the way
        request = queues.fair.next(lambda tenant: tenant in queues.num_running_of)
        if request is None or request.context.tenant in queues.num_running_of:
            return
        try:
            wait = self._admission.reason_to_wait(request)
        except PoolExhausted:
            return  # it is refused in its turn
        if wait is Wait.QUOTA:
            return
        may_start = wait is None
        while not (self._has_place() and may_start):
            victim = self._youngest_of_most()
            if victim is None:
                return
            queues.preempt(victim)
            may_start = self._admission.could_start(request)
        queues.start(request)

    def place_running(self) -> None:
        """Gives rows to the requests that run already, oldest first."""
        running = list(self._queues.running)
        allotted = self._allot(running)
        for request in running:
            if request.is_running:  # an older one may have preempted it
                self._place(request, allotted[request])

    def admit_waiting(self) -> None:
        """Starts waiting requests in fair order while blocks and budget allow.

        Siblings follow the first of them, so that they share its rows and its steps. While others
        wait, nobody gets more than its share of the places.
        """
        fair = self._queues.fair
        short_of_quota: set[str] = set()  # what they wait for is their own: nobody waits with them
        while self._has_place() and self._chunk_budget > 0:
            request = fair.next(self._has_its_share, short_of_quota)
            if request is None:
                return
            wait = self._admit(request)
            if wait is Wait.BLOCKS:
                return
            if wait is Wait.QUOTA:
                short_of_quota.add(request.context.tenant)
                continue
            for sibling in fair.siblings(request):
                is_in_share = not self._has_its_share(request.context.tenant)
                if not (is_in_share and self._has_place() and self._admit(sibling) is None):
                    break

    def _has_its_share(self, tenant: str) -> bool:
        """Whether a tenant runs as many requests as each could if all had the same number."""
        share = self._max_running // max(1, self._queues.fair.num_tenants)
        return self._queues.num_running_of[tenant] >= max(1, share)

    def _admit(self, request: Request) -> Wait | None:
        """Starts a request, or refuses it for good; returns why it has to wait if it does."""
        try:
            wait = self._admission.reason_to_wait(request)
        except PoolExhausted as error:
            self._refuse(request, error)
            return None
        if wait is not None:
            return wait
        self._queues.start(request)
        num_works = len(self.works)
        self._place(request, self._chunk_budget)
        self._chunk_budget -= sum(max(1, work.num_rows) for work in self.works[num_works:])
        has_found_blocks_taken = request.status is RequestStatus.WAITING
        return Wait.BLOCKS if has_found_blocks_taken else None

    def _allot(self, running: Sequence[Request]) -> dict[Request, int]:
        """Divides the rows of a step: one for each that decodes, chunks for the rest in fair order.

        Returns:
            Most rows of each request that runs; what is left is the budget of those that wait.
        """
        missing = {request: self._num_missing(request) for request in running}
        allotted = {request: 1 for request, count in missing.items() if count <= 1}
        budget = max(0, self._config.token_budget - len(allotted))
        wanting = [request for request in running if request not in allotted]
        first = self._queues.fair.next()
        # Rows kept for one that cannot start would keep those from ending for whom it waits.
        if first is not None and self._has_place() and self._admission.could_start(first):
            missing[first] = self._num_missing(first)
            wanting.append(first)
        for request in sorted(wanting, key=self._queues.fair.key):
            num_rows = min(missing[request], self._config.chunk_size, budget)
            if request is first:
                self._chunk_budget = num_rows  # left for it
            else:
                allotted[request] = num_rows
            budget -= num_rows
        self._chunk_budget += budget
        return allotted

    def _has_place(self) -> bool:
        return len(self._queues.running) < self._max_running

    def _place(self, request: Request, max_rows: int) -> None:
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
            num_rows = min(num_rows, self._config.chunk_size, max_rows)
            if num_rows == 0:
                return
        upto = first + num_rows
        kept_end = max(upto, self._tree.num_kept(tail))
        writes = self._reserve(request, kept_end)
        if writes is None:
            return
        num_free = self._tree.pool.num_free
        if bring_back(self._tree, tail) or kept_end > upto:
            writes = plan_writes(self._tree, tail, upto)
        copies = apply_writes(self._tree, writes)
        num_taken = num_free - self._tree.pool.num_free
        self._add(Work(request, first, upto, tuple(copies)), num_taken)

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
        self._queues.fair.charge(request, max(1, work.num_rows))
        request.num_promised -= min(request.num_promised, num_blocks)
        if is_complete:
            request.num_promised = 0
        if request.cached_tokens is None:
            request.cached_tokens = work.first
        self.works.append(work)

    def _reserve(self, request: Request, upto: int) -> BlockWrites | None:
        """Makes room for the KV of a path up to a position.

        Returns:
            What writing it takes now; None when the request has to wait, or was refused.
        """
        while True:
            writes = plan_writes(self._tree, request.context.tail, upto)
            has_free = writes.num_blocks <= self._tree.pool.num_free
            if has_free and self._admission.is_within_quota(request, writes.num_blocks):
                return writes
            if self._admission.make_room(request, writes.num_blocks):
                continue
            try:
                has_forgone_copy = self._admission.require_possible(request)
            except PoolExhausted as error:
                self._refuse(request, error)
                return None
            victim = self._youngest_after(request, of_any=not has_free) or request
            if has_forgone_copy:  # its rows begin earlier now: start over
                victim = request
            self._queues.preempt(victim)
            if victim is request:
                return None

    def _youngest_after(self, request: Request, *, of_any: bool) -> Request | None:
        """Finds who of the younger running requests gives way to this one in this step.

        The youngest, of the tenant that has most running; where only a quota is short, one of the
        same tenant.
        """
        tenant = request.context.tenant
        placed = {work.request for work in self.works}
        queues = self._queues
        younger = [
            other
            for other in queues.running
            if other.id > request.id
            and other not in placed
            and not other.context.is_pinned
            and (of_any or other.context.tenant == tenant)
        ]
        return max(
            younger,
            key=lambda other: (queues.num_running_of[other.context.tenant], other.id),
            default=None,
        )

    def _youngest_of_most(self) -> Request | None:
        """Finds the youngest request that can wait, of a tenant that has most and more than one."""
        queues = self._queues
        for tenant, count in queues.num_running_of.most_common():
            mine = [other for other in queues.running if other.context.tenant == tenant]
            movable = [other for other in mine[1:] if not other.context.is_pinned]
            if count > 1 and movable:
                return movable[-1]
        return None

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
