"""The tree of segments behind all contexts: where paths part, and who keeps what.

It owns what paths there are: fork, append, truncate, release, and what remains as prefix cache. How
a segment is cut or joined is `tree_shape`; how blocks come to segments is `block_writes`; how
firmly they are kept is `residency`; where KV goes that leaves the device is `eviction`. It knows no
context, no request and no tensor: a context is a tail segment here, held at a level.

    root(tenant, adapter)
      └─ S0  tokens 0..7   blocks [7, 3]
           ├─ S1  tokens 8..9    blocks [9]      tail of A, and of C forked from it: one segment
           └─ S2  tokens 8..11   blocks [5]      tail of B, which wrote token 10 after a fork at 10
"""

from array import array
from collections.abc import Hashable, Iterable, Iterator
from itertools import count

from agentkv.core import prefix_match
from agentkv.core.block_pool import BlockPool
from agentkv.core.head_logits import KEPT_HEADS, HeadLogits
from agentkv.core.lower_tiers import LowerTiers
from agentkv.core.occupancy import Readings
from agentkv.core.residency import Residency
from agentkv.core.segment import Hold, Segment
from agentkv.core.tree_audit import check_tree
from agentkv.core.tree_shape import join, split


class ContextTree:
    """All segments of one pool, below one root per tenant and adapter; roots share nothing.

    A fork costs nothing in the length of the context: children share their parent's tail until
    one of them appends. A segment without context and with a single child is one run of tokens
    with it, and the two are joined; so the last holder of a partly filled block finds the block
    in its own segment, and writes in place.

    Invariants: those of `Segment`, `BlockPool` and `Residency`; a child starts where its parent
    ends; no empty segment but the roots; no context-free segment has exactly one child.
    """

    def __init__(
        self,
        pool: BlockPool,
        *,
        block_size: int,
        head_capacity: int = KEPT_HEADS,
        lower: LowerTiers | None = None,
    ) -> None:
        self.block_size = block_size
        self.pool = pool
        self.lower = lower or LowerTiers(block_size)
        self.residency = Residency(pool, self.lower, block_size)
        self.heads = HeadLogits(head_capacity)
        self._roots: dict[Hashable, dict[str, Segment]] = {}
        self._ids = count(1)
        self._ticks = count(1)

    def root(self, key: Hashable, adapter: str = "") -> Segment:
        """Finds or makes the root of a tenant's contexts with an adapter, or with none.

        All roots of a tenant keep their accounts in the one without adapter.
        """
        roots = self._roots.setdefault(key, {})
        if "" not in roots:
            roots[""] = self.make_segment(0, array("I"), None)
        if adapter not in roots:
            made = self.make_segment(0, array("I"), None)
            made.account, made.held_below = roots[""], roots[""].held_below
            roots[adapter] = made
        return roots[adapter]

    def make_segment(self, start: int, tokens: "array[int]", parent: Segment | None) -> Segment:
        """Numbers a new segment; hanging it below its parent is the caller's."""
        return Segment(next(self._ids), start, tokens, parent)

    # -- verbs: a tail in, a tail out -------------------------------------------------------

    def open(
        self, key: Hashable, tokens: "array[int]", hold: Hold, adapter: str = ""
    ) -> tuple[Segment, int]:
        """Starts a path with these tokens on the longest cached prefix.

        Returns:
            The tail, and how many tokens have KV already, in some tier: whole blocks.
        """
        root = self.root(key, adapter)
        match = prefix_match.longest_match(root, tokens, self.block_size)
        tail = self.fork(match.segment, match.length) if match.length else root
        self.attach(tail, hold)
        if match.length < len(tokens):
            tail = self.append(tail, tokens[match.length :], hold)
        return tail, match.length

    def fork(self, tail: Segment, position: int) -> Segment:
        """Finds the segment that ends at `position` on this path, cutting one if need be."""
        assert 0 <= position <= tail.end
        node = tail
        while not node.is_root and node.start >= position:
            assert node.parent is not None
            node = node.parent
        return node if node.end == position else split(self, node, position)

    def append(self, tail: Segment, tokens: Iterable[int], hold: Hold) -> Segment:
        """Adds tokens, yet without KV, to the path of one context; returns its new tail."""
        if not tail.is_sealed:
            tail.tokens.extend(tokens)
            self.heads.drop(tail)
            return tail
        child = self.make_segment(tail.end, array("I", tokens), tail)
        tail.children[child] = None
        child.num_contexts = 1
        self.residency.hold(child, Hold.TOKENS, hold)
        for occupancy in self.residency.occupancies:
            if hold >= occupancy.level:
                occupancy.begin(child)
        tail.num_contexts -= 1
        self.residency.unhold(tail, Hold.TOKENS, hold)
        return child

    def truncate(self, tail: Segment, position: int, hold: Hold) -> Segment:
        """Moves a context's pointer to an earlier position; returns its new tail."""
        target = self.fork(tail, position)
        if target is not tail:
            self.attach(target, hold)
            self.detach(tail, hold)
        return target

    def attach(self, tail: Segment, hold: Hold, count: int = 1) -> Readings:
        """Lets `count` more contexts end here, each held at this level.

        Returns:
            What their bills begin with.
        """
        if not count:
            return ()
        tail.num_contexts += count
        self.residency.hold(tail, Hold.TOKENS, hold, count)
        return tuple(
            [
                (occupancy.tier, occupancy.hold(tail, count))
                for occupancy in self.residency.occupancies
                if hold >= occupancy.level
            ]
        )

    def detach(self, tail: Segment, hold: Hold) -> None:
        """Lets go of one context's path: what nobody holds becomes prefix cache or is freed."""
        self.touch(tail)
        for occupancy in self.residency.occupancies:
            if hold >= occupancy.level:
                occupancy.let_go(tail)
        tail.num_contexts -= 1
        self.residency.unhold(tail, Hold.TOKENS, hold)
        self.retire(tail)

    def rehold(self, tail: Segment, old: Hold, new: Hold) -> None:
        """Changes how firmly one context's path is kept."""
        if new > old:
            self.residency.hold(tail, Hold(old + 1), new)
        elif new < old:
            self.residency.unhold(tail, Hold(new + 1), old)
        for occupancy in self.residency.occupancies:
            if old < occupancy.level <= new:
                occupancy.hold(tail)
            elif new < occupancy.level <= old:
                occupancy.let_go(tail)

    def touch(self, tail: Segment) -> int:
        """Makes this path the most recently used; returns the logical time."""
        tail.last_used = next(self._ticks)
        return tail.last_used

    # -- paths -------------------------------------------------------------------------------

    def path(self, tail: Segment) -> list[Segment]:
        """Lists the segments from below the root to the tail."""
        nodes = []
        node = tail
        while node.parent is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]

    def tokens(self, tail: Segment, start: int = 0, end: int | None = None) -> "array[int]":
        """Reads the tokens of a path in [start, end); all by default."""
        last = tail.end if end is None else end
        tokens = array("I")
        for segment in self.path(tail):
            offset = segment.start
            tokens.extend(segment.tokens[max(start - offset, 0) : max(last - offset, 0)])
        return tokens

    def token_at(self, tail: Segment, position: int) -> int:
        """Reads one token of a path."""
        node = tail
        while node.start > position:
            assert node.parent is not None
            node = node.parent
        return node.tokens[position - node.start]

    def last_tokens(self, tail: Segment, count: int) -> "array[int]":
        """Reads up to `count` tokens at the end of a path."""
        tokens, node = array("I"), tail
        while node.parent is not None and len(tokens) < count:
            tokens = node.tokens + tokens
            node = node.parent
        return tokens[-count:]

    def num_computed(self, tail: Segment) -> int:
        """Counts the leading tokens of a path that have KV on the device."""
        node, computed = tail, tail.end
        while node.parent is not None and not node.is_computed:
            computed, node = node.num_computed, node.parent
        return computed

    def is_part(self, segment: Segment) -> bool:
        """Whether a segment is still in the tree, rather than evicted or joined with its child."""
        return segment.parent is not None and segment in segment.parent.children

    def num_kept(self, tail: Segment) -> int:
        """Counts the leading tokens of a path that have KV in some tier."""
        node, kept = tail, tail.end
        while node.parent is not None and node.num_kept < node.end:
            kept, node = node.num_kept, node.parent
        return kept

    def num_blocks_at(self, key: Hashable, level: Hold) -> int:
        """Counts the blocks that paths held at a level take for one key, once all is computed.

        What they share counts once. Costs a walk over those paths.
        """
        size, count, nodes = self.block_size, 0, list(self._roots.get(key, {}).values())
        while nodes:
            node = nodes.pop()
            count += -(-node.end // size) + -node.start // size  # a cut block is the upper part's
            nodes.extend(child for child in node.children if child.holds[level])
        return count

    def __iter__(self) -> Iterator[Segment]:
        """Walks all segments but the roots, parents before children."""
        for root in self.roots:
            for child in root.children:
                yield from self.walk(child)

    def walk(self, segment: Segment) -> Iterator[Segment]:
        """Walks a segment and all below it, parents before children."""
        nodes = [segment]
        while nodes:
            node = nodes.pop()
            yield node
            nodes.extend(node.children)

    # -- what goes ---------------------------------------------------------------------------

    def strip(self, segment: Segment, num_computed: int) -> None:
        """Gives back KV on the device from `num_computed`, and so all blocks behind it."""
        assert not segment.num_kv_children
        num_computed = min(num_computed, segment.num_computed)
        boundary = segment.start - segment.start % self.block_size + self.block_size
        if (segment.kept_end if segment.away else num_computed) < boundary:
            prefix_match.unindex(segment)
        first = segment.start // self.block_size
        is_empty = num_computed == segment.start
        kept = 0 if is_empty else -(-num_computed // self.block_size) - first
        self.residency.set_computed(segment, num_computed)
        self.residency.shrink(segment, kept)
        parent = segment.parent
        assert parent is not None
        if is_empty:
            parent.last_used = max(parent.last_used, segment.last_used)
            self.residency.offer(parent)

    def discard(self, segment: Segment) -> None:
        """Evicts a whole subtree that nobody holds."""
        parent = segment.parent
        assert parent is not None and not segment.holds[Hold.TOKENS]
        for node in reversed(list(self.walk(segment))):
            self.lower.release(self.lower.take_off(node))
            self.strip(node, node.start)
            self._remove(node)
        join(self, parent)

    def retire(self, tail: Segment) -> None:
        """Keeps of an unheld path what can be matched later, whole blocks with KV."""
        node = tail
        while not node.is_root and not node.holds[Hold.TOKENS] and not node.children:
            parent = node.parent
            assert parent is not None
            whole = node.num_kept - node.num_kept % self.block_size
            if node.away and node.kept_end > whole:
                self.lower.release(node.away[-1:])
                self.lower.set_away(node, node.away[:-1], whole)
            elif not node.away:
                self.strip(node, max(node.start, whole))
            if node.blocks or node.away:
                del node.tokens[node.num_kept - node.start :]
                self.heads.drop(node)
                self.residency.offer(node)
                return
            self._remove(node)
            node = parent
        join(self, node)

    def _remove(self, segment: Segment) -> None:
        assert not segment.blocks and not segment.away
        assert not segment.children and segment.index_key is None
        assert segment.parent is not None
        del segment.parent.children[segment]
        self.heads.drop(segment)

    @property
    def roots(self) -> Iterable[Segment]:
        """The empty segments that all paths begin with."""
        return [root for roots in self._roots.values() for root in roots.values()]

    def check(self) -> None:
        """Asserts every invariant; costs a walk over all segments."""
        check_tree(self)
