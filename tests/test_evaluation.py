"""The simulator of the evaluation: arithmetic by hand, conservation, and that it runs at all."""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from small_traces import call, write_agent, write_traces

from agentkv.core.batch import Batch, Run
from agentkv.core.step_cost import StepCost, StepWork
from benchmarks import paper_tables, sessions
from benchmarks.evaluation.decoding import saved_by_samples
from benchmarks.evaluation.meters import Limits, percentile
from benchmarks.evaluation.policies import (
    CONTESTANTS,
    FASTER_TRANSFORMER,
    ORCA,
    SHARING,
    Between,
    ContiguousPool,
    Extent,
    Policy,
    Reserve,
)
from benchmarks.evaluation.real_steps import StepTime, fit_steps
from benchmarks.evaluation.runs import Outcome, Setting, most, play_requests, prepare
from benchmarks.evaluation.simulated_step import Costs, work_of
from benchmarks.evaluation.traces import (
    Arrival,
    Length,
    Piece,
    Script,
    Turn,
    azure_requests,
    claude_sessions,
    mooncake_requests,
)
from benchmarks.evaluation.trees import FAST_TREE, Shape, build, recomputed_after_fork

COSTS = Costs(StepCost(0.01, 0.001, 1e-6, 1e-7), bare=0.001, move=0.0001)
SETTING = Setting(COSTS, Limits(100.0, 100.0), num_blocks=64, longest=256)
KEPT = [SHARING.then(between) for between in Between] + [
    policy.then(Between.HOLD) for policy in CONTESTANTS if not policy.by_request
]


@pytest.mark.parametrize(
    ("form", "length", "tokens"),
    [
        (Reserve.MAXIMUM, 33, 256),
        (Reserve.POWER, 33, 64),
        (Reserve.POWER, 64, 64),
        (Reserve.POWER, 200, 256),
        (Reserve.ORACLE, 33, 33),
    ],
)
def test_each_form_reserves_its_length(form: Reserve, length: int, tokens: int) -> None:
    """Catches a baseline made weaker, or stronger, than it was."""
    assert form.tokens(length, 256) == tokens


def test_reservations_are_in_one_piece() -> None:
    """Catches fragmentation that is not there, and room that never comes back."""
    pool = ContiguousPool(10)
    first, second, third = (pool.reserve(3) for _ in range(3))
    assert first and second and third
    pool.release(first)
    pool.release(third)
    assert pool.num_free == 7
    assert pool.reserve(5) is None  # 3 at the start and 4 at the end: no piece of 5
    assert pool.reserve(4) == Extent(6, 4)
    pool.release(second)
    assert pool.reserve(6) == Extent(0, 6)


def test_a_reservation_for_all_branches_is_all_or_none() -> None:
    """Catches a request that keeps half of what it could not have."""
    pool = ContiguousPool(10)
    assert pool.reserve_all([4, 4, 4]) is None
    assert pool.num_free == 10


def test_work_counts_shared_tokens_once_and_reads_for_each_row() -> None:
    """Catches a cost that charges sharing twice, or a chunk for tokens it cannot see."""
    runs = (Run(0, 0, 32, (0, 1), 0, 2), Run(1, 32, 40, (2,), 0, 1), Run(2, 32, 36, (3,), 1, 1))
    batch = Batch((1, 2), (39, 35), (39, 51), runs, (), (), (), ())
    assert work_of(batch) == StepWork(2, 32 + 8 + 4, 2 * 32 + 8 + 4)
    chunk = Batch((1, 2, 3), (0, 1, 2), (0, 1, 2), (Run(0, 0, 3, (0,), 0, 3),), (), (), (), ())
    assert work_of(chunk) == StepWork(3, 3, 1 + 2 + 3)


def test_an_agents_session_is_read_as_turns(tmp_path: Path) -> None:
    """Catches a replay that keeps what the trace drops, or counts an answer twice."""
    (script,) = claude_sessions(write_traces(tmp_path), Length(8))
    first, second, third = script.turns
    assert [piece.length for piece in first.pieces] == [16, 24]
    assert (first.keep, first.num_out) == (0, 2)  # 20 / 8, rounded to even
    assert (second.keep, second.num_new, second.pause) == (42, 8, 1.5)
    assert (third.keep, third.num_new) == (16, 16)  # two blocks of 64 in common
    assert [len(helper.turns) for helper in second.helpers] == [2, 1]
    starts = {helper.turns[0].pieces[0] for helper in second.helpers}
    assert starts == {Piece("helper model", 16)}  # they begin alike


def test_a_session_ends_before_it_is_too_long(tmp_path: Path) -> None:
    """Catches a replay that the model refuses."""
    write_agent(tmp_path, [call(0, 100, 10, [1]), call(1, 1000, 10, [1, 2])])
    (script,) = claude_sessions(tmp_path, Length(1, 200))
    assert len(script.turns) == 1


def test_requests_keep_their_times_and_their_prefixes(tmp_path: Path) -> None:
    """Catches arrivals out of step, and prefixes that are not shared."""
    write_traces(tmp_path)
    chats = azure_requests(tmp_path, Length())
    assert [arrival.at for arrival in chats[:2]] == [0.0, 1.0]
    assert chats[1].script.turns[0].length == 31 + 6
    prefixes = mooncake_requests(tmp_path, Length(32))
    one, other = (arrival.script.turns[0].pieces for arrival in prefixes[:2])
    assert one[0] == other[0] == Piece("mooncake 0", 16)
    assert one[1] != other[1] and one[1].length == 6


@pytest.mark.parametrize("read", [claude_sessions, azure_requests, mooncake_requests])
def test_a_missing_trace_is_named(read: Callable[..., object], tmp_path: Path) -> None:
    """Catches a stack trace where one line would do."""
    with pytest.raises(SystemExit, match=r"is missing: --data names the folder"):
        read(tmp_path, Length())


@pytest.mark.parametrize("policy", [*CONTESTANTS, *KEPT], ids=str)
def test_every_session_ends_and_the_pool_is_whole(policy: Policy, tmp_path: Path) -> None:
    """Catches a call that is lost, and memory that a policy forgets to give back."""
    scripts = claude_sessions(write_traces(tmp_path), Length(4, 256))
    simulated = prepare(policy, SETTING, since=0.0)
    ended: list[int] = []
    # Who holds a reservation and waits for sub-agents can block them for ever: one at a time then.
    apart = 100.0 if policy.reserve and policy.between is Between.HOLD else 0.1
    for number in range(5):
        simulated.player.start(apart * number, scripts[0], lambda: ended.append(1))
    assert simulated.player.run(until=10_000)
    assert len(ended) == 5
    assert simulated.player.meter.num_turns == 5 * 6  # three of its own, three of sub-agents
    assert simulated.player.num_reserved == 0
    simulated.engine.check()
    simulated.engine.flush_cache()
    assert simulated.engine.observer.pool().free == 64


@pytest.mark.parametrize("policy", CONTESTANTS, ids=str)
def test_every_branch_generates_all_its_tokens(policy: Policy) -> None:
    """Catches contestants that are compared on different work."""
    turn = Turn(0.0, 0, (Piece(None, 40),), 10, branches=3)
    simulated = prepare(policy, SETTING, since=0.0)
    simulated.player.start(0.0, Script((turn,)))
    assert simulated.player.run()
    assert simulated.player.meter.num_tokens == 30
    view = simulated.engine.view()
    assert view.computed_tokens == (40 if policy.shares else 120) + 3 * 9


def test_a_batch_of_requests_lets_nobody_in() -> None:
    """Catches FasterTransformer-style batches that are continuous after all."""

    def script(num_out: int) -> Script:
        return Script((Turn(0.0, 0, (Piece(None, 16),), num_out),))

    arrivals = [Arrival(0.0, script(50)), Arrival(0.0, script(5)), Arrival(0.1, script(5))]
    waits = {
        policy: play_requests(3.0, arrivals, policy, SETTING).first_token
        for policy in (FASTER_TRANSFORMER, ORCA[0])
    }
    assert waits[FASTER_TRANSFORMER] > 0.5 > waits[ORCA[0]]


def test_parking_lets_more_sessions_live_than_holding() -> None:
    """Catches a PARK lease that keeps its blocks on the device."""
    turns = tuple(Turn(5.0, 40 * n, (Piece(None, 30),), 10) for n in range(5))
    given = {}
    for between in (Between.HOLD, Between.PARK):
        simulated = prepare(SHARING.then(between), SETTING, since=0.0)
        for _ in range(4):
            simulated.player.start(0.0, Script(turns))
        assert simulated.player.run(until=1000)
        given[between] = simulated.player.meter.given
    assert given[Between.PARK] < given[Between.HOLD] / 4


def test_the_search_finds_the_largest_load() -> None:
    """Catches a search that stops short, or answers a load that was not met."""

    def play(limit: float) -> Callable[[float], Outcome]:
        return lambda load: Outcome(load, load <= limit, 0, 0, 0, 0, 0, 0, 0, 0, 0, None, 0, 0, ())

    assert most(play(37), 4, whole=True).load in (35, 36, 37)
    assert most(play(1), 4, whole=True).load == 1
    assert most(play(0), 4, whole=True).load == 0
    assert 0.9 <= most(play(1.0), 0.25, whole=False).load <= 1.0


def test_a_percentile_is_one_of_the_values() -> None:
    """Catches an interpolated figure, which nobody waited."""
    assert percentile([float(n) for n in range(100)]) == 95.0
    assert percentile([]) == 0.0


def test_the_fit_finds_the_line_behind_the_steps() -> None:
    """Catches a fit that outliers or steps without rows draw away."""
    cost = StepCost(0.005, 0.0003, 2e-6, 1e-7)
    works = [StepWork(rows, 16 * kv, rows * kv) for rows in (1, 8, 64) for kv in (1, 40, 300)]
    steps = [StepTime(work, cost.seconds(work)) for work in works]
    fit = fit_steps([*steps, StepTime(StepWork(0, 0, 0), 0.0002)])
    assert fit.cost.per_row == pytest.approx(cost.per_row, rel=1e-3)
    assert (fit.bare, fit.num_steps) == (0.0002, len(steps))
    assert fit.r_squared == pytest.approx(1.0)


def test_samples_share_their_prompts_blocks() -> None:
    """Catches a count of blocks that differs from counting by hand."""
    # Two blocks of prompt; each of two samples has one of its own from the second step on, and
    # 16 tokens in it at the last one.
    by_hand = [1 - 2 / 4] + [1 - 4 / 6] * 16
    assert saved_by_samples(32, 17, 2) == pytest.approx(sum(by_hand) / len(by_hand))


def test_a_published_tree_takes_the_blocks_it_should() -> None:
    """Catches a tree that shares less than arithmetic says, or computes tokens twice."""
    shape = FAST_TREE[0]
    assert (shape.num_distinct, shape.blocks_alone, shape.tail) == (2568, 1216, 528)
    assert build(shape) == (227, 0)
    assert build(Shape("apart", (3,), (20,))) == (6, 0)
    assert [recomputed_after_fork(50, at) for at in (50, 49, 16)] == [0, 1, 1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "main"), [("sessions", sessions.main), ("paper_tables", paper_tables.main)]
)
def test_a_quick_run_writes_its_report(
    name: str, main: Callable[[], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a command that the engine has moved away from."""
    path = tmp_path / "report.json"
    data = write_traces(tmp_path)
    monkeypatch.setattr(sys, "argv", [name, "--quick", "--data", str(data), "--json", str(path)])
    main()
    report = json.loads(path.read_text())
    assert report["name"] == name
    assert report["results"] and report["targets"]
