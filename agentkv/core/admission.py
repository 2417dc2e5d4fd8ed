"""What a request can need, what there is, and who gives way.

Under pressure, in this order: prefix cache goes; idle contexts leave the device (droppable and
expired ones first, then parked ones, then the rest, each least recently used first); the youngest
running request waits (`StepPlanner`); the request is refused with numbers. What is pinned never
gives way. What leaves goes to the host, or is recomputed at its next use: `eviction`.
"""

import math
from enum import Enum

from agentkv.core.block_writes import forgo_copy, plan_writes, settle
from agentkv.core.context import Context
from agentkv.core.context_store import ContextStore
from agentkv.core.eviction import evict
from agentkv.core.request import Request, RequestStatus
from agentkv.core.request_queues import RequestQueues
from agentkv.core.segment import Hold
from agentkv.errors import PoolExhausted


class Wait(Enum):
    """What a request that could run waits for."""

    BLOCKS = "blocks"
    """Blocks of the pool: those that come after it wait as well."""
    QUOTA = "quota"
    """Blocks that other requests of its tenant have: other tenants need not wait with it."""


class Admission:
    """Decides on blocks: possible at all, possible now, and made free when they are needed."""

    def __init__(self, store: ContextStore, queues: RequestQueues, watermark: int) -> None:
        self._store = store
        self._tree = store.tree
        self._queues = queues
        self._quotas = store.quotas
        self._watermark = watermark

    def require_possible(self, request: Request) -> bool:
        """Makes sure that a request could run if all that may give way did.

        A path that would need just one block more, for a copy, is made to do without the copy.

        Returns:
            Whether it was, and so lacks a few tokens more than before.

        Raises:
            PoolExhausted: It could not: the pool or the tenant's quota is too small, or too much
                of it is pinned; or the tenant has used up its block-seconds.
        """
        return self._require_possible(request, self._num_needed(request))

    def reason_to_wait(self, request: Request) -> Wait | None:
        """Says why a waiting request cannot start now; None if its blocks can all be had.

        They can be had beside what others were promised. Counted are copy-on-write, and the block
        the first sampled token will be written to.

        Raises:
            PoolExhausted: See `require_possible`.
        """
        need = self._num_needed(request)
        while self._require_possible(request, need):
            need = self._num_needed(request)
        return self._wait(request, need)

    def could_start(self, request: Request) -> bool:
        """Whether a waiting request has no reason to wait, were it possible; refuses nobody."""
        return self._wait(request, self._num_needed(request)) is None

    def is_within_quota(self, request: Request, num_blocks: int) -> bool:
        """Whether a request's tenant may hold `num_blocks` more now."""
        if not num_blocks:
            return True
        tenant = request.context.tenant
        limit = self._quotas.max_blocks(tenant)
        if limit is not None and self._tree.root(tenant).held_below[Hold.KV] + num_blocks > limit:
            return False
        return not self._quotas.is_spent(tenant)

    def make_room(self, request: Request, num_blocks: int) -> bool:
        """Makes `num_blocks` to be had for a request, by cache and idle contexts alone.

        For a quota only idle contexts of the same tenant give way.
        """
        for context in self._idle(request.context.tenant):
            if self.is_within_quota(request, num_blocks):
                break
            self._store.give_way(context)
        if not self.is_within_quota(request, num_blocks):
            return False
        if evict(self._tree, num_blocks):
            return True
        for context in self._idle(None):
            self._store.give_way(context)
            if evict(self._tree, num_blocks):
                return True
        return False

    def _require_possible(self, request: Request, need: int) -> bool:
        tenant = request.context.tenant
        if need and self._quotas.is_spent(tenant):
            raise self._quotas.refuse_spent(tenant, need)
        lacking_quota = need - self._quota_room(request, Hold.PINNED)
        lacking = max(need - self._room(request, Hold.PINNED), lacking_quota)
        if lacking <= 0:
            return False
        if lacking == 1 and forgo_copy(self._tree, request.context.tail):
            return True
        if lacking_quota > 0:
            raise self._over_quota(request, need)
        raise self._exhausted(request, need)

    def _wait(self, request: Request, need: int) -> Wait | None:
        tenant, running = request.context.tenant, self._queues.running
        mine = sum(other.num_promised for other in running if other.context.tenant == tenant)
        if need + mine > self._quota_room(request, Hold.FIRM):
            return Wait.QUOTA
        promised = sum(other.num_promised for other in running)
        ahead = 0
        if running and request.params is not None:
            ahead = int(request.params.max_tokens > 1)
        if need + ahead + promised > self._room(request, Hold.FIRM):
            return Wait.BLOCKS
        request.num_promised = need
        return None

    def _idle(self, tenant: str | None) -> list[Context]:
        """Lists idle contexts, of one tenant or all, in the order in which they give way."""
        idle = [
            context
            for context in self._store
            if context.hold is Hold.KV and tenant in (None, context.tenant)
        ]
        idle.sort(
            key=lambda context: (
                context.request is not None,
                context.lease.firmness,
                context.last_used,
            )
        )
        return idle

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
        return self._tree.pool.num_blocks - self._held(request, hold, self._tree.residency.held)

    def _quota_room(self, request: Request, hold: Hold) -> float:
        """Blocks of its tenant's quota that a request may count on."""
        limit = self._quotas.max_blocks(request.context.tenant)
        if limit is None:
            return math.inf
        return limit - self._held(request, hold, request.context.tail.held_below)

    def _held(self, request: Request, hold: Hold, held: list[int]) -> int:
        """Reads a count of blocks held at a level, with this request's own path at that level."""
        context = request.context
        before = context.hold
        self._store.set_hold(context, max(before, hold))
        count = held[hold]
        self._store.set_hold(context, before)
        return count

    def _over_quota(self, request: Request, need: int) -> PoolExhausted:
        path = self._tree.path(request.context.tail)
        return self._quotas.refuse_blocks(
            request.context.tenant,
            need,
            room=int(self._quota_room(request, Hold.KV)),
            room_if_idle_gave_way=int(self._quota_room(request, Hold.FIRM)),
            own=sum(segment.num_owned(self._tree.block_size) for segment in path),
        )

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
