"""A small run on the real model, next to the same run in simulated time.

Owns the sizes of that run and how its findings travel in a report, so that a later simulation can
be given them.
"""

import json
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from agentkv.config import SchedulerConfig
from agentkv.core.step_cost import StepCost
from agentkv.engine.runner import Runner
from benchmarks.evaluation.meters import Meter, percentile
from benchmarks.evaluation.player import Player
from benchmarks.evaluation.policies import NOT_SHARING, ORCA, SHARING, Between, Policy
from benchmarks.evaluation.real_steps import Fit, RealClock, fit_steps, real_runner
from benchmarks.evaluation.simulated_step import Clock, CostRunner, Costs
from benchmarks.evaluation.traces import Script
from benchmarks.hollow_runner import BLOCK_SIZE, BYTES_PER_TOKEN, hollow_engine
from benchmarks.report import Result

FIT = "steps of smollm2"
NUM_SESSIONS = 12
MOST_TURNS = 6
STAGGER = 0.3
"""Seconds between the starts of two sessions."""
PAUSE_SHARE = 0.1
"""Of the trace's pauses, so that sessions meet."""
NUM_BLOCKS = 1024
LONGEST = 4096
VOCAB_SIZE = 49_152
CONTESTANTS = (SHARING.then(Between.RETAIN), NOT_SHARING, ORCA[0])
COSTS = ("fixed", "per row", "per distinct token", "per token and row", "bare", "move of a block")


def measure(scripts: Sequence[Script], scheduler: SchedulerConfig) -> tuple[Costs, list[Result]]:
    """Runs sessions on the real model, fits its steps, and repeats the run in simulated time."""
    runner = real_runner(NUM_BLOCKS, scheduler)
    shortened = [_shortened(script) for script in scripts[:NUM_SESSIONS]]
    results = []
    for policy in CONTESTANTS:
        results += _play("real", runner, RealClock(), policy, shortened, scheduler)
    fit = fit_steps(runner.steps)
    costs = Costs(fit.cost, fit.bare, _seconds_to_move())
    for policy in CONTESTANTS:
        clock = Clock()
        simulated = CostRunner(clock, costs)
        results += _play("simulated", simulated, clock, policy, shortened, scheduler)
    return costs, [*_described(fit, costs), *results]


def read(path: Path) -> tuple[Costs, list[Result]]:
    """Takes the findings of a real run from an earlier report.

    Raises:
        SystemExit: There is no such report, or it has none.
    """
    if not path.is_file():
        raise SystemExit(f"{path} is missing: --measured names the report of an earlier real run.")
    found = [Result(**result) for result in json.loads(path.read_text(encoding="utf-8"))["results"]]
    results = [result for result in found if result.workload.startswith((FIT, "real", "simulated"))]
    values = {result.metric: result.median / 1e6 for result in results if result.workload == FIT}
    if not values.keys() >= set(COSTS):
        raise SystemExit(f"{path} holds no real run: run without --measured.")
    *step, bare, move = (values[name] for name in COSTS)
    return Costs(StepCost(*step), bare, move), results


def _play(
    kind: str,
    runner: Runner,
    clock: Clock,
    policy: Policy,
    scripts: Sequence[Script],
    scheduler: SchedulerConfig,
) -> list[Result]:
    engine = hollow_engine(
        runner,
        num_blocks=NUM_BLOCKS,
        max_length=LONGEST,
        vocab_size=VOCAB_SIZE,
        scheduler=scheduler,
        clock=clock,
        timer=clock,
    )
    player = Player(engine, clock, policy, Meter(), longest=LONGEST)
    start = clock.now
    for number, script in enumerate(scripts):
        player.start(start + number * STAGGER, script)
    began = time.perf_counter()
    player.run()
    meter, workload = player.meter, f"{kind}, {len(scripts)} sessions"
    values = (
        ("p95 to first token", "s", percentile(meter.first_tokens)),
        ("p95 to next token", "s", percentile(meter.next_tokens)),
        ("mean to first token", "s", sum(meter.first_tokens) / len(meter.first_tokens)),
        ("pool given, mean", "1", meter.given),
        ("tokens computed", "tokens", player.view().computed_tokens),
        ("time of the run on this machine", "s", time.perf_counter() - began),
    )
    return [Result.of(workload, policy.name, name, unit, [value]) for name, unit, value in values]


def _shortened(script: Script) -> Script:
    """The first turns, with shorter pauses and without sub-agents."""
    turns = [
        turn._replace(pause=turn.pause * PAUSE_SHARE, helpers=())
        for turn in script.turns[:MOST_TURNS]
    ]
    return Script(tuple(turn for turn in turns if turn.length <= LONGEST))


def _seconds_to_move() -> float:
    """Measures copying the KV of one block in memory."""
    source = torch.ones(64, BLOCK_SIZE * BYTES_PER_TOKEN * 2 // 4)  # float32: twice bf16's bytes
    target = torch.zeros_like(source)
    start = time.perf_counter()
    for row, other in zip(source, target, strict=True):
        other.copy_(row)
    return (time.perf_counter() - start) / len(source)


def _described(fit: Fit, costs: Costs) -> list[Result]:
    cost = fit.cost
    seconds = (
        cost.fixed,
        cost.per_row,
        cost.per_distinct_token,
        cost.per_read_token,
        costs.bare,
        costs.move,
    )
    named = [
        Result.of(FIT, "fit", name, "us", [1e6 * value])
        for name, value in zip(COSTS, seconds, strict=True)
    ]
    quality = (
        ("R^2", fit.r_squared),
        ("median error of a step", fit.median_error),
        ("error of all steps together", fit.total_error),
    )
    named += [Result.of(FIT, "fit", name, "1", [value]) for name, value in quality]
    return [*named, Result.of(FIT, "fit", "steps measured", "steps", [fit.num_steps])]
