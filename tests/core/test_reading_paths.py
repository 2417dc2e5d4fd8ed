"""Reading a part of a path: tokens of several segments, cut at both ends."""

from array import array
from itertools import combinations_with_replacement

from agentkv.core.block_pool import BlockPool
from agentkv.core.context_tree import ContextTree
from agentkv.core.segment import Hold


def test_any_part_of_a_path_is_read_as_from_a_list() -> None:
    """Catches a token lost or doubled where two segments meet, or another branch's token."""
    tree = ContextTree(BlockPool(8), block_size=4)
    tail, _ = tree.open("tenant", array("I", range(5)), Hold.KV)
    for number, length in enumerate((1, 4, 7)):  # each branch leaves a segment behind
        middle = tree.fork(tail, tail.end)
        tree.attach(middle, Hold.KV)
        other = tree.append(middle, [90 + number], Hold.KV)
        tail = tree.append(tail, range(tail.end, tail.end + length), Hold.KV)
        assert tree.token_at(other, other.end - 1) == 90 + number
    assert len(tree.path(tail)) == 4
    whole = list(range(tail.end))
    assert list(tree.tokens(tail)) == whole
    for start, end in combinations_with_replacement(range(tail.end + 1), 2):
        assert list(tree.tokens(tail, start, end)) == whole[start:end]
