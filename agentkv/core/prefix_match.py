"""The longest cached prefix of a token sequence, in whole blocks.

Explicit forks and the automatic prefix cache are the same tree: a running context's computed
blocks can be matched like those of a released one, and those in a lower tier like those on the
device. Tokens are compared, never hashes alone. A
block can be matched once the step that wrote it has finished, because only then `num_computed`
covers it.
"""

from array import array
from typing import NamedTuple

from agentkv.core.segment import Segment


class PrefixMatch(NamedTuple):
    """A point on the tree: `length` tokens of the path that runs through `segment`."""

    segment: Segment
    length: int


def longest_match(root: Segment, tokens: "array[int]", block_size: int) -> PrefixMatch:
    """Finds the longest prefix of `tokens`, a multiple of `block_size`, that has KV below `root`.

    Siblings may begin with the same block (two equal prompts computed in one step), so all that
    agree are followed.
    """
    best = PrefixMatch(root, 0)
    nodes = [root]
    while nodes:
        node = nodes.pop()
        end = node.start + _num_common(node, tokens)
        whole = end - end % block_size
        if whole > best.length:
            best = PrefixMatch(node, whole)
        if end == node.end and end < len(tokens):
            nodes.extend(node.index.get(_key(tokens, end, block_size), ()))
    return best


def index(segment: Segment, block_size: int) -> None:
    """Lists a segment in its parent's index as soon as its first block boundary has KV."""
    if segment.index_key is not None or segment.parent is None:
        return
    boundary = segment.start - segment.start % block_size + block_size
    if segment.num_kept >= boundary:
        segment.index_key = segment.tokens[: boundary - segment.start].tobytes()
        segment.parent.index.setdefault(segment.index_key, {})[segment] = None


def unindex(segment: Segment) -> None:
    """Takes a segment out of its parent's index, before its start, parent or KV changes."""
    if segment.index_key is None:
        return
    assert segment.parent is not None
    listed = segment.parent.index[segment.index_key]
    del listed[segment]
    if not listed:
        del segment.parent.index[segment.index_key]
    segment.index_key = None


def _key(tokens: "array[int]", start: int, block_size: int) -> bytes:
    return tokens[start : start - start % block_size + block_size].tobytes()


def _num_common(node: Segment, tokens: "array[int]") -> int:
    """Tokens of `node` with KV that equal the sequence's own at the same positions."""
    low, high = 0, max(0, min(node.num_kept, len(tokens)) - node.start)
    while low < high:  # invariant: the first `low` agree; beyond `high` they do not
        middle = (low + high + 1) // 2
        same = node.tokens[low:middle] == tokens[node.start + low : node.start + middle]
        low, high = (middle, high) if same else (low, middle - 1)
    return low
