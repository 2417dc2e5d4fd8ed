"""Bills: what each context, tree and tenant has used since it began.

It owns who is charged and how bills add up: a context's running bill, and what released contexts
leave to their tree and their tenant, so nothing is lost. Block-seconds come from `occupancy`, by
readings taken when a context begins and ends to hold its path. It starts no timer: whoever
changes contexts tells it the time first.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from agentkv.core.bill import Bill
from agentkv.core.context import Context
from agentkv.core.occupancy import Occupancy, Readings
from agentkv.core.usage_view import TierView
from agentkv.errors import NotFound


@dataclass(slots=True)
class _TreeAccount:
    """A created context and what descends from it."""

    tenant: str
    closed: Bill = field(default_factory=Bill)
    """Of its released contexts."""
    num_contexts: int = 0


class Ledger:
    """The bills of one pool.

    Invariants: the running bills and the closed ones of a tenant add up to what its contexts
    have used; a hidden context's use is its parent's. Block-seconds of all tenants and those of
    nobody add up to what was taken.
    """

    def __init__(self, occupancies: Sequence[Occupancy], *, max_ended_trees: int) -> None:
        self._occupancies = tuple(occupancies)
        self._by_tier = {occupancy.tier: occupancy for occupancy in occupancies}
        self._max_ended_trees = max_ended_trees
        self._closed: dict[str, Bill] = {}
        self._trees: dict[str, _TreeAccount] = {}
        self._ended: dict[str, _TreeAccount] = {}
        """Trees without a living context, the longest ended first."""

    def advance(self, now: float) -> None:
        """Moves time on, in seconds of any clock that does not run backwards."""
        for occupancy in self._occupancies:
            occupancy.advance(now)

    # -- charging ----------------------------------------------------------------------------

    def begin(self, context: Context) -> None:
        """Begins to charge a context for what it holds now."""
        context.readings = tuple(
            (occupancy.tier, occupancy.read(context.tail))
            for occupancy in self._occupancies
            if context.hold >= occupancy.level
        )

    def end(self, context: Context) -> None:
        """Charges a context for what it has held so far, and stops."""
        for tier, used in self._used(context):
            context.bill.charge(tier, used)
        context.readings = ()

    def count_rows(self, context: Context, first: int, upto: int, num_copies: int) -> None:
        """Counts rows that the model ran for a context, at the positions [first, upto)."""
        bill = context.bill
        bill.computed_tokens += upto - first
        bill.block_copies += num_copies
        if first < context.num_once_computed:
            bill.recomputed_tokens += min(upto, context.num_once_computed) - first
        if upto > context.num_once_computed:
            context.num_once_computed = upto

    def count_reuse(self, context: Context, num_tokens: int) -> None:
        """Counts the tokens whose KV a context found; at its first use alone."""
        if not context.is_used:
            context.is_used = True
            context.bill.reused_tokens += num_tokens
            context.num_once_computed = max(context.num_once_computed, num_tokens)

    # -- contexts come and go ----------------------------------------------------------------

    def add(self, context: Context) -> None:
        """Counts a new context to its tree."""
        if context.root_id not in self._trees:
            self._trees[context.root_id] = _TreeAccount(context.tenant)
        self._trees[context.root_id].num_contexts += 1

    def close(self, context: Context) -> None:
        """Adds a released context's bill to those of its tree and its tenant."""
        tree = self._trees[context.root_id]
        self._settle(context, tree)
        tree.num_contexts -= 1
        if not tree.num_contexts:
            self._ended[context.root_id] = self._trees.pop(context.root_id)
            while len(self._ended) > self._max_ended_trees:
                del self._ended[next(iter(self._ended))]

    def close_hidden(self, context: Context) -> None:
        """Adds what a hidden context used after its parent, whose bill it shared, was released."""
        self._settle(context, self._trees.get(context.root_id) or self._ended.get(context.root_id))

    def _used(self, context: Context) -> Readings:
        """Finds what a context has used, by tier, since it was last charged."""
        return tuple(
            (tier, self._by_tier[tier].read(context.tail).since(reading))
            for tier, reading in context.readings
        )

    def _settle(self, context: Context, tree: _TreeAccount | None) -> None:
        self._closed.setdefault(context.tenant, Bill()).add(context.bill)
        if tree is not None:
            tree.closed.add(context.bill)

    # -- what observers see ------------------------------------------------------------------

    def of_contexts(self, contexts: Iterable[Context]) -> Bill:
        """Sums the running bills of living contexts, hidden ones too, up to now."""
        total, seen = Bill(), set[int]()
        for context in contexts:
            if id(context.bill) not in seen:  # a hidden context shares its parent's
                seen.add(id(context.bill))
                total.add(context.bill)
            for tier, used in self._used(context):
                total.charge(tier, used)
        return total

    def of_tree(self, tenant: str, root_id: str, contexts: Iterable[Context]) -> Bill:
        """Sums what a tree has used, given its living contexts.

        Raises:
            NotFound: There is no such tree, it is another tenant's, or it ended long ago.
        """
        tree = self._trees.get(root_id) or self._ended.get(root_id)
        if tree is None or tree.tenant != tenant:
            raise NotFound(
                "No such tree; it may have ended long ago. The tenant's usage still counts it."
            )
        total = self.of_contexts(contexts)
        total.add(tree.closed)
        return total

    def of_tenant(self, tenant: str, contexts: Iterable[Context]) -> Bill:
        """Sums what a tenant has used since start, given its living contexts."""
        total = self.of_contexts(contexts)
        total.add(self._closed.get(tenant, Bill()))
        return total

    def tiers(self) -> tuple[TierView, ...]:
        """Shows what was used since start, by tier."""
        return tuple(
            TierView(
                occupancy.tier,
                occupancy.taken_block_seconds,
                occupancy.held_block_seconds,
                occupancy.unheld_block_seconds,
            )
            for occupancy in self._occupancies
        )
