"""From an image back to contexts: tokens first, then KV block by block, then handles.

Until the handles are made, hidden contexts hold each run of tokens, so that whatever happens
meanwhile neither joins nor drops it. It knows no file and no tensor.
"""

from array import array
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from agentkv.core import prefix_match
from agentkv.core.context import Context
from agentkv.core.context_store import ContextStore
from agentkv.core.eviction import evict
from agentkv.core.lease import Lease
from agentkv.core.segment import Hold
from agentkv.core.tree_image import ROOT, StoredBlock, TreeImage


class Fill(NamedTuple):
    """A block of the pool that is to get the KV of a block of the image."""

    number: int
    """Which of the image's blocks."""
    block_id: int


class Planting:
    """An image on its way into a store.

    Invariants: nothing of it has a handle before `finish`; after `abandon` nothing of it is left
    but prefix cache whose KV was written.
    """

    def __init__(self, store: ContextStore, tenant: str, image: TreeImage) -> None:
        """Plants the tokens; takes no block, and finds what the prefix cache has of them."""
        self.image = image
        self.tenant = tenant
        self._store = store
        self._tree = store.tree
        self._blocks = image.blocks(store.tree.block_size)
        self._pens: list[Context] = []
        """By run: who holds it."""
        root = self._tree.root(tenant)
        for node in image.nodes:
            if node.parent == ROOT:
                tail, _ = self._tree.open(tenant, array("I", node.tokens), Hold.FIRM)
            else:
                above = self._pens[node.parent].tail
                self._tree.attach(above, Hold.FIRM)
                tail = self._tree.append(above, node.tokens, Hold.FIRM)
            self._pens.append(store.add_hidden(tenant, tail, Hold.FIRM))
        assert not any(pen.tail is root for pen in self._pens)

    @property
    def num_blocks(self) -> int:
        """Blocks of the image's KV."""
        return len(self._blocks)

    @property
    def num_computed(self) -> int:
        """Counts the tokens, shared ones once, that have KV now."""
        nodes = zip(self.image.nodes, self._pens, strict=True)
        return sum(
            max(0, min(node.end, self._tree.num_computed(pen.tail)) - node.start)
            for node, pen in nodes
        )

    def reserve(self, first: int, last: int) -> list[Fill]:
        """Takes pool blocks for the image's blocks [first, last), as far as there is room.

        Room is what is free or prefix cache, within the tenant's quota: nobody gives way for it.
        What is cached already needs none. `commit` is to be told what was written, before
        anything else happens to the tree.
        """
        fills: list[Fill] = []
        for number in range(first, last):
            stored = self._blocks[number]
            tail = self._pens[stored.node].tail
            computed = self._tree.num_computed(tail)
            size = self._tree.block_size
            if computed >= stored.number * size + self._own_slots(stored):
                continue  # cached
            if any(segment.away for segment in self._tree.path(tail)):
                continue  # cached in a lower tier, from where the next use brings it back
            if not self._has_room(len(fills) + 1):
                break
            fills.append(Fill(number, -1))
        ids = self._tree.pool.allocate(len(fills))
        return [Fill(fill.number, id) for fill, id in zip(fills, ids, strict=True)]

    def commit(self, fills: Iterable[Fill]) -> None:
        """Records that blocks were written; from now on they are KV of their paths."""
        for fill in fills:
            stored = self._blocks[fill.number]
            pen = self._pens[stored.node]
            self._share_cut_block(stored.node)
            size = self._tree.block_size
            is_next = self._tree.num_computed(pen.tail) == max(
                stored.number * size, self.image.nodes[stored.node].start
            )
            if not is_next:  # an earlier block of the path found no room
                self._tree.pool.release([fill.block_id])
                continue
            self._tree.residency.grow(pen.tail, [fill.block_id])
            self._extend(stored.node, (stored.number + 1) * size)
        for index in range(len(self._pens)):
            self._share_cut_block(index)

    def finish(self, leases: Sequence[Lease], now: float) -> list[Context]:
        """Makes the contexts, ancestors first, and lets go of the rest.

        Raises:
            PoolExhausted: The tenant may not have so many contexts, or trees so deep.
        """
        store, made = self._store, list[Context]()
        depths = list[int]()
        for saved in self.image.contexts:
            depths.append(0 if saved.parent is None else depths[saved.parent] + 1)
        store.require_room(self.tenant, len(self.image.contexts), max(depths, default=0))
        root = self._tree.root(self.tenant)
        for saved, lease, depth in zip(self.image.contexts, leases, depths, strict=True):
            tail = root if saved.node == ROOT else self._pens[saved.node].tail
            parent = None if saved.parent is None else made[saved.parent]
            made.append(
                store.add_restored(
                    self.tenant,
                    tail,
                    lease,
                    now,
                    parent=parent,
                    fork_position=saved.fork_position,
                    ordinal=saved.ordinal,
                    depth=depth,
                    labels=saved.labels,
                )
            )
        self.abandon()
        return made

    def abandon(self) -> None:
        """Lets go of every run that no context holds. Abandoning twice is fine."""
        pens, self._pens = self._pens, []
        for pen in reversed(pens):
            self._store.release(pen)

    def _own_slots(self, stored: StoredBlock) -> int:
        """Counts the leading slots of a block that its first run has KV in."""
        size = self._tree.block_size
        return min(size, self.image.nodes[stored.node].num_computed - stored.number * size)

    def _has_room(self, need: int) -> bool:
        tree, quotas = self._tree, self._store.quotas
        if tree.lower.moves:  # a block that is free may be about to be read
            return False
        limit = quotas.max_blocks(self.tenant)
        held = tree.root(self.tenant).held_below[Hold.KV]
        if (limit is not None and held + need > limit) or quotas.is_spent(self.tenant):
            return False
        return tree.pool.num_free >= need or evict(tree, need, moves=False)

    def _extend(self, index: int, upto: int) -> None:
        """Moves a run's KV up to a position, or its own end."""
        tail, node = self._pens[index].tail, self.image.nodes[index]
        self._tree.residency.set_computed(tail, min(upto, node.num_computed))
        prefix_match.index(tail, self._tree.block_size)

    def _share_cut_block(self, index: int) -> None:
        """Lists the last block of a run's parent with the run if its KV goes on there."""
        size, node = self._tree.block_size, self.image.nodes[index]
        tail = self._pens[index].tail
        is_cut = node.parent != ROOT and node.start % size and node.num_computed > node.start
        if not is_cut or tail.blocks:
            return
        above = self._pens[node.parent].tail
        if above.is_computed and tail.parent is above:
            self._tree.pool.acquire(above.blocks[-1])
            self._tree.residency.grow(tail, [above.blocks[-1]])
            self._extend(index, (node.start // size + 1) * size)
