"""Contexts and the tokens they share as plain values: what a snapshot is of.

It owns how paths of the tree become values, each shared run once, and which blocks hold their KV.
It knows no file and no tensor; how an image becomes contexts again is `tree_planting`.

    block_size = 4     node 0  tokens 0..9    3 blocks     contexts: A at node 1, B at node 2
                         ├─ 1  tokens 10..11  its block is the last of node 0
                         └─ 2  tokens 8..12   after a copy: 2 blocks of its own
"""

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from agentkv.core.context import Context
from agentkv.core.context_tree import ContextTree
from agentkv.core.lease import LeaseMode
from agentkv.core.segment import Segment

ROOT = -1
"""In place of a node's number: where every path begins."""


@dataclass(frozen=True, slots=True)
class ImageNode:
    """A run of tokens that follows another one."""

    parent: int
    """Number of the run before it, below its own, or ROOT."""
    start: int
    """Position of its first token."""
    tokens: "array[int]"
    num_computed: int
    """Position, in [start, end], up to which its tokens have KV in the image."""

    @property
    def end(self) -> int:
        """Position after the last token."""
        return self.start + len(self.tokens)

    def block_numbers(self, block_size: int) -> range:
        """Numbers, along the path, of the blocks with its KV; the first may be its parent's last.

        A number is the position of a block's first slot over the block size.
        """
        if self.num_computed == self.start:
            return range(0)
        return range(self.start // block_size, -(-self.num_computed // block_size))


@dataclass(frozen=True, slots=True)
class ImageContext:
    """One context, but for its handle and its blocks."""

    id: str
    """Its handle when it was saved; whoever restores it gets another one."""
    node: int
    """Where its path ends, or ROOT for an empty context."""
    parent: int | None
    """Number of the context it was forked from, below its own; None when that is not here."""
    fork_position: int
    ordinal: int
    """Number of its random stream."""
    labels: Mapping[str, str]
    lease_mode: LeaseMode
    lease_ttl: float


class StoredBlock(NamedTuple):
    """A block of an image's KV."""

    node: int
    """The first run that has KV in it."""
    number: int
    """Its number along the path."""
    used: int
    """Leading slots that hold KV of the image, at least 1."""


@dataclass(frozen=True, slots=True)
class TreeImage:
    """A context, or a tree of contexts.

    Invariants (`check_image`): parents come before children; a run follows where its parent ends;
    a run has KV only if all of its parent has; one run at most goes on in its parent's last block.
    """

    nodes: tuple[ImageNode, ...]
    contexts: tuple[ImageContext, ...]

    def length(self, context: ImageContext) -> int:
        """Counts the tokens of a context."""
        return 0 if context.node == ROOT else self.nodes[context.node].end

    @property
    def num_tokens(self) -> int:
        """Counts the tokens, shared ones once."""
        return sum(len(node.tokens) for node in self.nodes)

    @property
    def num_computed(self) -> int:
        """Counts the tokens that have KV in the image."""
        return sum(node.num_computed - node.start for node in self.nodes)

    def blocks(self, block_size: int) -> list[StoredBlock]:
        """Lists the blocks of its KV in the order of the runs, each once."""
        found: dict[tuple[int, int], int] = {}  # (first run, number) -> slots used
        last_of: list[tuple[int, int] | None] = []  # by run: its last block
        for index, node in enumerate(self.nodes):
            last = None
            for number in node.block_numbers(block_size):
                is_shared = number * block_size < node.start and node.parent != ROOT
                shared = last_of[node.parent] if is_shared else None
                last = shared or (index, number)
                used = min(block_size, node.num_computed - number * block_size)
                found[last] = max(found.get(last, 0), used)
            last_of.append(last)
        return [StoredBlock(index, number, used) for (index, number), used in found.items()]

    def without_kv(self) -> "TreeImage":
        """Returns the same tokens and contexts without any KV."""
        nodes = tuple(
            ImageNode(node.parent, node.start, node.tokens, node.start) for node in self.nodes
        )
        return TreeImage(nodes, self.contexts)


def capture(
    tree: ContextTree, contexts: Sequence[Context], tails: Sequence[Segment], *, with_kv: bool
) -> TreeImage:
    """Makes the image of contexts whose committed tokens end with the given tails.

    Args:
        tree: Where they are.
        contexts: Ancestors before their descendants.
        tails: Of each context, the segment that ends at its committed length.
        with_kv: Whether the image counts on the KV that is on the device now.
    """
    numbers: dict[Segment, int] = {}
    nodes: list[ImageNode] = []
    for tail in tails:
        for segment in tree.path(tail):
            if segment not in numbers:
                assert segment.parent is not None
                numbers[segment] = len(nodes)
                above = numbers.get(segment.parent, ROOT)
                computed = segment.num_computed if with_kv else segment.start
                tokens = array("I", segment.tokens)
                nodes.append(ImageNode(above, segment.start, tokens, computed))
    order = {context: number for number, context in enumerate(contexts)}
    return TreeImage(
        tuple(nodes),
        tuple(
            _describe(context, numbers.get(tail, ROOT), order)
            for context, tail in zip(contexts, tails, strict=True)
        ),
    )


def check_image(image: TreeImage, block_size: int) -> str | None:
    """Says what is wrong with an image that comes from elsewhere; None when it can be planted."""
    goes_on: set[int] = set()
    for index, node in enumerate(image.nodes):
        above = None if node.parent == ROOT else image.nodes[node.parent]
        if not ROOT <= node.parent < index or not node.tokens:
            return "a run of tokens is empty or out of order"
        if node.start != (0 if above is None else above.end):
            return "a run of tokens does not follow its parent"
        if not node.start <= node.num_computed <= node.end:
            return "a run has KV for tokens it does not have"
        if node.num_computed > node.start and above is not None:
            if above.num_computed != above.end:
                return "a run has KV that the tokens before it lack"
            if node.start % block_size and node.parent in goes_on:
                return "two runs have KV in the same slots"
            goes_on.add(node.parent)
    for index, context in enumerate(image.contexts):
        if not ROOT <= context.node < len(image.nodes):
            return "a context ends nowhere"
        if context.parent is not None and not 0 <= context.parent < index:
            return "contexts are out of order"
        if not 0 <= context.fork_position <= image.length(context) + (1 << 32):
            return "a fork position is out of range"
    return None


def _describe(context: Context, node: int, order: Mapping[Context, int]) -> ImageContext:
    """Describes a context; a parent that is not saved is left out for the nearest one that is."""
    parent, position = context.parent, context.fork_position
    while parent is not None and parent not in order:
        position = min(position, parent.fork_position)
        parent = parent.parent
    return ImageContext(
        id=context.id,
        node=node,
        parent=None if parent is None else order[parent],
        fork_position=0 if parent is None else position,
        ordinal=context.ordinal,
        labels=dict(context.labels),
        lease_mode=LeaseMode.RETAIN if context.lease.is_expired else context.lease.mode,
        lease_ttl=context.lease.ttl,
    )
