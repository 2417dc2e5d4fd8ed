"""Handles, holds and lineage, without a scheduler."""

import itertools

import pytest

from agentkv.config import LimitsConfig, PressureConfig
from agentkv.core.block_pool import BlockPool
from agentkv.core.context import Context
from agentkv.core.context_store import ContextStore
from agentkv.core.context_tree import ContextTree
from agentkv.core.lease import Lease, LeaseMode
from agentkv.core.lineage import descendants
from agentkv.core.observer import Observer
from agentkv.core.pressure import PressureGauge
from agentkv.core.segment import Hold
from agentkv.core.views import ContextView
from agentkv.errors import InvalidRequest, NotFound, Reason

RETAINED = Lease(LeaseMode.RETAIN, 3600.0)


def make_store(**limits: int) -> ContextStore:
    """An empty store."""
    names = itertools.count()
    tree = ContextTree(BlockPool(16), block_size=4)
    return ContextStore(tree, LimitsConfig(**limits), lambda: f"c{next(names)}")


def create(store: ContextStore, length: int, *, pinned: bool = False) -> str:
    """Creates a context whose tokens are committed, yet without KV."""
    lease = Lease(LeaseMode.PIN, 3600.0) if pinned else RETAINED
    context = store.create("t", range(length), lease=lease, labels={}, now=5.0)
    context.length = length
    return context.id


def view_of(store: ContextStore, context: Context) -> ContextView:
    """The context as its owner sees it."""
    return Observer(store, PressureGauge(PressureConfig())).view(context)


def test_views_tell_what_has_no_kv() -> None:
    """Catches KV claimed for tokens that were never computed."""
    store = make_store()
    view = view_of(store, store.get("t", create(store, 9)))
    assert (view.length, view.num_computed, view.private_blocks) == (9, 0, 0)
    assert view.residency == "none"
    assert (view.create_time, view.depth, view.root_id) == (5.0, 0, view.id)
    assert view.parent_id is None


def test_children_of_different_forks_have_different_streams() -> None:
    """Catches cousins that draw the same random numbers."""
    store = make_store()
    root = store.get("t", create(store, 3))
    seen = {root.ordinal}
    level = [root]
    for _ in range(3):
        level = [
            child
            for parent in level
            for child in store.fork(parent, count=3, at=None, lease=parent.lease, labels={}, now=0)
        ]
        seen |= {child.ordinal for child in level}
    assert len(seen) == 1 + 3 + 9 + 27


def test_children_inherit_the_hold() -> None:
    """Catches a pinned context whose children can be pushed out."""
    store = make_store()
    parent = store.get("t", create(store, 8, pinned=True))
    (child,) = store.fork(parent, count=1, at=4, lease=parent.lease, labels={}, now=0)
    assert child.is_pinned and child.hold is Hold.PINNED
    assert view_of(store, child).pinned
    store.check()


def test_descendants_come_before_their_parents() -> None:
    """Catches a subtree listed in part, or in an order that orphans."""
    store = make_store()
    root = store.get("t", create(store, 3))
    first, second = store.fork(root, count=2, at=None, lease=root.lease, labels={}, now=0)
    (grandchild,) = store.fork(first, count=1, at=None, lease=first.lease, labels={}, now=0)
    found = descendants(root)
    assert set(found) == {root, first, second, grandchild}
    assert all(found.index(c) < found.index(c.parent) for c in found if c.parent is not None)
    store.release(first)
    assert grandchild not in descendants(root), "its link to the root is gone"
    assert grandchild.parent is first


def test_a_line_of_forks_keeps_no_tokens_of_released_parents() -> None:
    """Catches memory that grows with every turn of an agent that forks and drops its parent."""
    store = make_store()
    context = store.get("t", create(store, 50))
    for _ in range(5):
        (child,) = store.fork(context, count=1, at=40, lease=context.lease, labels={}, now=0)
        child.tail = store.tree.append(child.tail, range(10), child.hold)
        child.length = 50
        store.release(context)
        context = child
    store.check()
    parents = []
    node = context.parent
    while node is not None:
        parents.append(node)
        node = node.parent
    assert len(parents) == 5
    assert all(len(parent.tail.tokens) == 0 for parent in parents)
    assert view_of(store, context).parent_id == parents[0].id


def test_hidden_branches_have_no_handle() -> None:
    """Catches a branch of Score that can be found, listed, or counted against a quota."""
    store = make_store(max_contexts=1)
    parent = store.get("t", create(store, 3))
    hidden = store.fork_hidden(parent, 3)
    store.check()
    assert len(store) == 1
    for branch in hidden:
        with pytest.raises(NotFound):
            store.get("t", branch.id)
        assert branch.hold is Hold.TOKENS
        store.release(branch)
    store.check()
    assert parent.children == {}


def test_tokens_in_a_range() -> None:
    """Catches a range that is off by one, or shows what is not committed."""
    store = make_store()
    context = store.get("t", create(store, 9))
    assert store.tokens(context, 0, None) == tuple(range(9))
    assert store.tokens(context, 3, 2) == (3, 4)
    assert store.tokens(context, 8, 99) == (8,)
    assert store.tokens(context, 9, None) == ()
    with pytest.raises(InvalidRequest) as refusal:
        store.tokens(context, 10, None)
    assert refusal.value.reason is Reason.POSITION_OUT_OF_RANGE
    context.length = 5
    assert store.tokens(context, 3, None) == (3, 4)


def test_labels_are_the_callers_no_more() -> None:
    """Catches labels that change when the caller's mapping does."""
    store = make_store()
    labels = {"a": "b"}
    context = store.create("t", [1], lease=RETAINED, labels=labels, now=0)
    labels["a"] = "changed"
    assert view_of(store, context).labels == (("a", "b"),)


def test_check_finds_a_miscounted_tail() -> None:
    """Catches an audit that audits nothing."""
    store = make_store()
    context = store.get("t", create(store, 3))
    context.tail.num_contexts += 1
    with pytest.raises(AssertionError):
        store.check()
