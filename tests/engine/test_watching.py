"""What a watcher is told, in which order, and what becomes of one that lags."""

import pytest
from bench import TENANT, Bench, numbers

from agentkv.core import watch
from agentkv.core.lease import LeaseMode, LeaseTerms
from agentkv.core.watch import Change, ChangeKind, PoolChange, Snapshot, Watcher, WatchUpdate


def told(watcher: Watcher) -> list[WatchUpdate]:
    """Takes everything there is."""
    updates: list[WatchUpdate] = []
    while watcher.has_more:
        updates.extend(watcher.take_news())
    return updates


def kinds(updates: list[WatchUpdate]) -> list[tuple[ChangeKind, str]]:
    """Lists what happened to whom."""
    return [(item.kind, item.context_id) for item in updates if isinstance(item, Change)]


def test_a_snapshot_comes_first_and_numbers_have_no_gap() -> None:
    """Catches a change told before the snapshot, one told twice, or a number left out."""
    bench = Bench()
    root = bench.create(numbers(1, 20))
    watcher = bench.engine.observer.watch(TENANT)
    (branch,) = bench.fork(root)  # the snapshot shows it
    first = told(watcher)
    (snapshot,) = first
    assert isinstance(snapshot, Snapshot) and snapshot.is_first and snapshot.is_last
    assert [view.id for view in snapshot.contexts] == [root, branch]
    assert snapshot.pool == bench.pool_view
    bench.extend(branch, [1, 2, 3])
    bench.truncate(branch, 5)
    bench.generate(root, 2)
    bench.release(branch)
    new = bench.create(numbers(2, 8))
    updates = told(watcher)
    assert kinds(updates) == [
        (ChangeKind.RESIZED, branch),
        (ChangeKind.RESIZED, root),
        (ChangeKind.RELEASED, branch),
        (ChangeKind.CREATED, new),
        (ChangeKind.RESIZED, new),
    ]
    assert [item.sequence for item in first + updates] == list(range(1, 7))
    resized = [item for item in updates if isinstance(item, Change)]
    assert [item.length for item in resized] == [5, 22, 5, 0, 8]


def test_a_watcher_hears_of_its_own_tenant_alone() -> None:
    """Catches another tenant's handles in a watch."""
    bench = Bench()
    watcher = bench.engine.observer.watch("other")
    bench.create(numbers(1, 20))
    bench.engine.contexts.create("other", numbers(2, 20))
    bench.drain()
    (snapshot,) = told(watcher)
    assert isinstance(snapshot, Snapshot)
    assert [view.length for view in snapshot.contexts] == [20]
    bench.create(numbers(3, 20))
    assert told(watcher) == []


def test_leases_are_told() -> None:
    """Catches a lease that ends without a word, or a warning that comes with every look."""
    bench = Bench()
    context = bench.create(numbers(1, 20))
    watcher = bench.engine.observer.watch(TENANT)
    told(watcher)
    bench.engine.contexts.update_lease(TENANT, context, LeaseTerms(LeaseMode.PIN, 100.0))
    for _ in range(20):
        bench.now += 6
        bench.engine.advance()
    bench.generate(context, 1)
    bench.engine.contexts.update_lease(TENANT, context, LeaseTerms(LeaseMode.PARK))
    assert [kind for kind, _ in kinds(told(watcher))] == [
        ChangeKind.LEASED,
        ChangeKind.EXPIRING,
        ChangeKind.EXPIRED,
        ChangeKind.LEASED,
        ChangeKind.RESIZED,
        ChangeKind.PARKED,
    ]


def test_what_gives_way_and_comes_back_is_told() -> None:
    """Catches KV that goes, or comes back, in silence; and pressure that does not show."""
    bench = Bench(num_blocks=8)
    context = bench.create(numbers(1, 64))
    watcher = bench.engine.observer.watch(TENANT)
    told(watcher)
    other = bench.create(numbers(2, 100))
    assert (ChangeKind.EVICTED, context) in kinds(told(watcher))
    bench.release(other)
    bench.generate(context, 1)
    assert (ChangeKind.RESTORED, context) in kinds(told(watcher))
    assert [watcher] == list(bench.engine.watchers()) or not watcher.has_more


def test_pressure_is_told_when_it_changes() -> None:
    """Catches a level told with every step, or not at all."""
    bench = Bench(num_blocks=8)
    watcher = bench.engine.observer.watch(TENANT)
    told(watcher)
    levels = []
    for number in range(4):
        bench.create(numbers(number, 32), pinned=True)
        bench.engine.watchers()
        levels += [item.pool.level for item in told(watcher) if isinstance(item, PoolChange)]
    assert levels == ["soft", "hard"]


def test_one_that_lags_gets_a_fresh_snapshot(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches memory that grows with what a watcher does not read, and a gap without a word."""
    monkeypatch.setattr(watch, "MAX_UNREAD", 10)
    bench = Bench()
    root = bench.create(numbers(1, 20))
    watcher = bench.engine.observer.watch(TENANT)
    told(watcher)
    branches = bench.fork(root, 50)
    bench.release(*branches[1:])
    assert len(watcher._changes) <= 11
    (snapshot,) = told(watcher)
    assert isinstance(snapshot, Snapshot) and snapshot.is_first
    assert [view.id for view in snapshot.contexts] == [root, branches[0]]
    assert snapshot.sequence == 2
    bench.release(branches[0])
    assert kinds(told(watcher)) == [(ChangeKind.RELEASED, branches[0])]


def test_a_large_snapshot_comes_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a snapshot that no message can carry."""
    monkeypatch.setattr(watch, "PAGE_SIZE", 4)
    bench = Bench()
    root = bench.create(numbers(1, 20))
    bench.fork(root, 9)
    watcher = bench.engine.observer.watch(TENANT)
    pieces = told(watcher)
    assert all(isinstance(piece, Snapshot) for piece in pieces)
    shape = [
        (len(piece.contexts), piece.is_first, piece.is_last)
        for piece in pieces
        if isinstance(piece, Snapshot)
    ]
    assert shape == [(4, True, False), (4, False, False), (2, False, True)]


def test_a_watcher_that_left_costs_nothing() -> None:
    """Catches watchers that pile up after their readers went away."""
    bench = Bench()
    watcher = bench.engine.observer.watch(TENANT)
    bench.engine.observer.unwatch(watcher)
    bench.engine.observer.unwatch(watcher)
    bench.create(numbers(1, 20))
    assert not watcher.has_more and list(bench.engine.watchers()) == []
