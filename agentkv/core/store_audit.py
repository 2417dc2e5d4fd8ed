"""Asserts that contexts and tree agree; costs a walk over both.

For tests, and for an engine that is idle. It changes nothing.
"""

from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from agentkv.core.context_store import ContextStore


def check_store(store: "ContextStore") -> None:
    """Asserts what the docstrings of store and context promise, and all of `check_tree`."""
    tails: dict[object, int] = {}
    for context in (*store, *store.hidden):
        assert not context.is_released
        assert context.length <= context.tail.end
        assert context.request is not None or context.length == context.tail.end
        tails[context.tail] = tails.get(context.tail, 0) + 1
    for segment in store.tree:
        assert segment.num_contexts == tails.get(segment, 0), "a tail is miscounted"
    for occupancy in store.tree.residency.occupancies:
        holders = Counter(
            segment
            for context in (*store, *store.hidden)
            if context.hold >= occupancy.level
            for segment in store.tree.path(context.tail)
        )
        for segment in store.tree:
            number = occupancy.num_holders(segment)
            assert number in (None, holders[segment]), "a holder is miscounted"
    store.tree.check()
