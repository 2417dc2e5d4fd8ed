"""Who is served next: tenants in turn, and within a tenant trees in turn, by tokens computed.

It keeps what each was served and orders requests; it moves none and knows no block.

Source: weighted fair queueing with equal weights (Demers, Keshav, Shenker 1989). Each flow has a
tag that grows by what it is served. A level's clock grows by the same, divided among the flows
that are active, so it stands where the tags of equally served flows stand. A flow that was away
comes back at the clock: it has saved up nothing, and owes what it had too much.
"""

import bisect
from collections.abc import Callable, Collection, Hashable

from agentkv.core.request import Request


class FairClock:
    """Flows of one level.

    Invariant: no flow waits for ever while others are served. The clock grows without end, and a
    new flow begins at it, so a waiting flow's tag, which stands still, is the smallest some day.
    """

    def __init__(self) -> None:
        self._clock = 0.0
        self._tags: dict[Hashable, float] = {}
        self._num_active: dict[Hashable, int] = {}

    def enter(self, flow: Hashable) -> None:
        """Adds a request to a flow."""
        self._num_active[flow] = self._num_active.get(flow, 0) + 1
        if self._num_active[flow] == 1:
            self._tags[flow] = max(self._clock, self._tags.get(flow, 0.0))

    def leave(self, flow: Hashable) -> None:
        """Takes a request from a flow."""
        self._num_active[flow] -= 1
        if self._num_active[flow]:
            return
        del self._num_active[flow]
        # One that was served less than its share loses that; debts are kept until they are paid.
        if len(self._tags) > 2 * len(self._num_active) + 64:
            self._tags = {
                flow: tag
                for flow, tag in self._tags.items()
                if flow in self._num_active or tag > self._clock
            }

    def charge(self, flow: Hashable, num_tokens: int) -> None:
        """Notes that an active flow was served."""
        self._tags[flow] += num_tokens
        self._clock += num_tokens / len(self._num_active)

    def tag(self, flow: Hashable) -> float:
        """Orders active flows: the smallest is next."""
        return self._tags[flow]

    def is_active(self, flow: Hashable) -> bool:
        """Whether the flow has any request."""
        return flow in self._num_active

    @property
    def num_active(self) -> int:
        """Flows that have a request."""
        return len(self._num_active)


class FairOrder:
    """The order in which a scheduler's requests are served.

    Invariants: a request is in, from `enter` to `leave`; of those, the ones that wait are listed by
    tenant and tree, in order of arrival.
    """

    def __init__(self) -> None:
        self._tenants = FairClock()
        self._trees: dict[str, FairClock] = {}
        self._waiting: dict[str, dict[str, list[Request]]] = {}

    @property
    def num_tenants(self) -> int:
        """Tenants that have a request."""
        return self._tenants.num_active

    def enter(self, request: Request) -> None:
        """Takes in a new request."""
        tenant = request.context.tenant
        self._tenants.enter(tenant)
        self._trees.setdefault(tenant, FairClock()).enter(request.context.root_id)

    def leave(self, request: Request) -> None:
        """Lets go of a request that has ended, and does not wait."""
        tenant = request.context.tenant
        self._tenants.leave(tenant)
        self._trees[tenant].leave(request.context.root_id)
        if not self._tenants.is_active(tenant):
            del self._trees[tenant]

    def wait(self, request: Request) -> None:
        """Lists a request as waiting."""
        trees = self._waiting.setdefault(request.context.tenant, {})
        requests = trees.setdefault(request.context.root_id, [])
        bisect.insort(requests, request, key=lambda other: other.id)

    def unwait(self, request: Request) -> None:
        """Takes a request off the list of those that wait."""
        context = request.context
        trees = self._waiting[context.tenant]
        trees[context.root_id].remove(request)
        if not trees[context.root_id]:
            del trees[context.root_id]
        if not trees:
            del self._waiting[context.tenant]

    def charge(self, request: Request, num_tokens: int) -> None:
        """Notes what a request was served."""
        tenant = request.context.tenant
        self._tenants.charge(tenant, num_tokens)
        self._trees[tenant].charge(request.context.root_id, num_tokens)

    def next(
        self,
        passed_over: Callable[[str], bool] = lambda tenant: False,
        left_out: Collection[str] = (),
    ) -> Request | None:
        """Finds who of those that wait is served next.

        Args:
            passed_over: Whether a tenant has to wait until no other does.
            left_out: Tenants that are not served at all.
        """
        tenants = [tenant for tenant in self._waiting if tenant not in left_out]
        if not tenants:
            return None
        tenant = min(tenants, key=lambda name: (passed_over(name), self._tenants.tag(name)))
        trees, tags = self._waiting[tenant], self._trees[tenant]
        return min(trees.items(), key=lambda tree: (tags.tag(tree[0]), tree[1][0].id))[1][0]

    def siblings(self, request: Request) -> list[Request]:
        """Lists those that wait and go on where this request does, in order of arrival."""
        context = request.context
        same_tree = self._waiting.get(context.tenant, {}).get(context.root_id, [])
        return [other for other in same_tree if other.context.tail is context.tail]

    def key(self, request: Request) -> tuple[float, float, int]:
        """Orders requests, waiting or running, by what their tenant and tree were served."""
        tenant = request.context.tenant
        tree_tag = self._trees[tenant].tag(request.context.root_id)
        return self._tenants.tag(tenant), tree_tag, request.id
