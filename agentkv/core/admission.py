"""What a request can need, what there is, and who gives way.

Under pressure, in this order: prefix cache goes; idle contexts leave the device, least recently
used first; the youngest running request waits (`StepPlanner`); the request is refused with
numbers. What is pinned never gives way. What leaves goes to the host, or is recomputed: `eviction`.
"""

from agentkv.core.block_writes import forgo_copy, plan_writes, settle
from agentkv.core.context_store import ContextStore
from agentkv.core.eviction import evict
from agentkv.core.request import Request, RequestStatus
from agentkv.core.request_queues import RequestQueues
from agentkv.core.segment import Hold
from agentkv.errors import PoolExhausted


class Admission:
    """Decides on blocks: possible at all, possible now, and made free when they are needed."""

    def __init__(self, store: ContextStore, queues: RequestQueues, watermark: int) -> None:
        self._store = store
        self._tree = store.tree
        self._queues = queues
        self._watermark = watermark

    def require_possible(self, request: Request) -> bool:
        """Makes sure that a request could run if all that may give way did.

        A path that would need just one block more, for a copy, is made to do without the copy.

        Returns:
            Whether it was, and so lacks a few tokens more than before.

        Raises:
            PoolExhausted: It could not: the pool is too small, or too much of it is pinned.
        """
        need = self._num_needed(request)
        lacking = need - self._room(request, Hold.PINNED)
        if lacking <= 0:
            return False
        if lacking == 1 and forgo_copy(self._tree, request.context.tail):
            return True
        raise self._exhausted(request, need)

    def may_start(self, request: Request) -> bool:
        """Whether a waiting request's blocks can all be had now, beside what others were promised.

        Counts copy-on-write, and the block the first sampled token will be written to.
        """
        need = self._num_needed(request)
        promised = sum(other.num_promised for other in self._queues.running)
        ahead = 0
        if self._queues.running and request.params is not None:
            ahead = int(request.params.max_tokens > 1)
        if need + ahead + promised > self._room(request, Hold.FIRM):
            return False
        request.num_promised = need
        return True

    def make_room(self, num_blocks: int) -> bool:
        """Frees blocks until `num_blocks` are free, by cache and idle contexts alone."""
        if evict(self._tree, num_blocks):
            return True
        idle = [context for context in self._store if context.hold is Hold.KV]
        idle.sort(key=lambda context: (context.request is not None, context.last_used))
        for context in idle:
            self._store.set_hold(context, Hold.TOKENS)
            if evict(self._tree, num_blocks):
                return True
        return False

    def _num_needed(self, request: Request) -> int:
        tail = request.context.tail
        settle(self._tree, tail)
        upto = max(request.target, self._tree.num_kept(tail))
        return plan_writes(self._tree, tail, upto).num_blocks

    def _room(self, request: Request, hold: Hold) -> int:
        """Blocks that a request may count on; the watermark is for those who run."""
        kept_back = 0 if request.status is RequestStatus.RUNNING else self._watermark
        return max(0, self._num_beside(request, hold) - kept_back)

    def _num_beside(self, request: Request, hold: Hold) -> int:
        """Blocks beside those held at this level or above, by this request's own path too."""
        context = request.context
        before = context.hold
        self._store.set_hold(context, max(before, hold))
        held = self._tree.residency.held[hold]
        self._store.set_hold(context, before)
        return self._tree.pool.num_blocks - held

    def _exhausted(self, request: Request, need: int) -> PoolExhausted:
        pool = self._tree.pool
        # Not what the request itself stands on: that cannot make room for it.
        reclaimable = self._num_beside(request, Hold.FIRM) - pool.num_free
        usable = pool.num_blocks - self._watermark
        advice = (
            "Release or unpin contexts, then try again."
            if need <= usable
            else "Start the server with a larger pool, or use a shorter context."
        )
        return PoolExhausted(
            f"{need} more blocks are needed; {pool.num_free} of {usable} are free and "
            f"{reclaimable} reclaimable. {advice}",
            metadata={
                "need": need,
                "free": pool.num_free,
                "reclaimable": reclaimable,
                "total": pool.num_blocks,
            },
            retry_after=1.0 if need <= usable else None,
        )
