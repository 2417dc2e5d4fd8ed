"""One run of one contestant: so many sessions at once, or requests at such a rate.

Owns how traffic is laid out in time and the search for the most that a contestant serves within
the limits. It knows no model: a runner is made for each run.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from agentkv.config import SchedulerConfig
from agentkv.engine.engine import Engine
from benchmarks.evaluation.meters import Limits, Meter, Moment, percentile
from benchmarks.evaluation.player import Player
from benchmarks.evaluation.policies import Between, Policy
from benchmarks.evaluation.simulated_step import Clock, CostMover, CostRunner, Costs
from benchmarks.evaluation.traces import Arrival, Script
from benchmarks.hollow_runner import hollow_engine

PATIENCE = 10
"""Times the limit for a first token that a call may wait at the gate before a run is given up."""
HOST_TIMES = 8
"""Blocks of the host tier for each of the pool, where contexts are parked."""
MOST = 4096.0
"""Largest load that is tried."""
FINE = 1.1
"""Sizes are told apart down to this ratio."""


@dataclass(frozen=True, slots=True)
class Setting:
    """What all contestants have in common."""

    costs: Costs
    limits: Limits
    num_blocks: int
    longest: int
    """Most tokens of a context."""
    ramp: float = 120.0
    """Seconds over which sessions start; what arrives in them is not counted."""
    measured: float = 240.0
    """Seconds after the ramp."""
    most_load: float = MOST
    scheduler: SchedulerConfig = SchedulerConfig()  # noqa: RUF009  # frozen


class Outcome(NamedTuple):
    """What a run came to."""

    load: float
    """Sessions at once, or requests per second."""
    is_met: bool
    """Whether the limits were kept, and nothing was given up."""
    first_token: float
    """95th percentile, in seconds."""
    next_token: float
    num_turns: int
    tokens_per_second: float
    given: float
    """Mean share of blocks given to contexts or reserved."""
    filled: float
    """Mean share of slots with a token's KV for a context."""
    filled_of_allocated: float
    """Mean share of allocated slots that hold a token's KV."""
    num_preempted: int
    num_refused: int
    given_when_refused: float | None
    computed_tokens: int
    peak_active: int
    moments: tuple[Moment, ...]


def play_sessions(
    num: int, scripts: Sequence[Script], policy: Policy, setting: Setting, seed: int = 1
) -> Outcome:
    """Keeps `num` sessions alive: whoever ends is followed by another one at once."""
    source = random.Random(seed)
    _, clock, player = prepare(policy, setting, since=setting.ramp)

    def begin(at: float) -> None:
        player.start(at, source.choice(scripts), lambda: begin(clock.now))

    for number in range(num):
        begin(setting.ramp * number / num)
    return _finish(num, clock, player, setting, until=setting.ramp + setting.measured)


def play_requests(
    rate: float, arrivals: Sequence[Arrival], policy: Policy, setting: Setting
) -> Outcome:
    """Plays requests at a mean rate: the trace's own times, stretched or pressed."""
    span = arrivals[-1].at - arrivals[0].at
    stretch = (len(arrivals) - 1) / rate / span
    _, clock, player = prepare(policy, setting, since=0.0)
    for arrival in arrivals:
        player.start((arrival.at - arrivals[0].at) * stretch, arrival.script)
    return _finish(rate, clock, player, setting, until=float("inf"))


def play_mixed(
    num: int,
    scripts: Sequence[Script],
    requests: Sequence[Arrival],
    policy: Policy,
    setting: Setting,
) -> Outcome:
    """Keeps `num` sessions alive while requests arrive, spread evenly over the run."""
    source = random.Random(1)
    _, clock, player = prepare(policy, setting, since=setting.ramp)
    until = setting.ramp + setting.measured

    def begin(at: float) -> None:
        player.start(at, source.choice(scripts), lambda: begin(clock.now))

    for number in range(num):
        begin(setting.ramp * number / num)
    for number, request in enumerate(requests):
        player.start(until * number / len(requests), request.script)
    return _finish(num, clock, player, setting, until=until)


def most(
    play: Callable[[float], Outcome], first: float, *, whole: bool, limit: float = MOST
) -> Outcome:
    """Searches the largest load that is met: doubling or halving, then between.

    Args:
        play: Runs a load.
        first: Load to begin with.
        whole: Loads are whole numbers.
        limit: Largest load that is tried.

    Returns:
        The outcome under that load; under load 0 when not even the smallest is met.
    """
    outcome = play(first)
    best, low, high = (outcome, first, first) if outcome.is_met else (None, first, first)
    while best is not None and high * 2 <= limit and (outcome := play(high * 2)).is_met:
        best, low, high = outcome, high * 2, high * 2
    if best is not None:
        high = min(high * 2, limit)
    while best is None and low > (1 if whole else first / 64):
        low /= 2
        if (outcome := play(low)).is_met:
            best, high = outcome, low * 2
    if best is None:
        return outcome._replace(load=0.0)
    while high / low > FINE and not (whole and high - low <= 1):
        middle = (low * high) ** 0.5
        middle = min(max(round(middle), low + 1), high - 1) if whole else middle
        outcome = play(middle)
        if outcome.is_met:
            best, low = outcome, middle
        else:
            high = middle
    return best


class Simulated(NamedTuple):
    """An engine on simulated time, and who plays sessions against it."""

    engine: Engine
    clock: Clock
    player: Player


def prepare(policy: Policy, setting: Setting, *, since: float) -> Simulated:
    """Makes a fresh one; what arrives before `since` is not counted."""
    clock = Clock()
    engine = hollow_engine(
        CostRunner(clock, setting.costs),
        num_blocks=setting.num_blocks,
        max_length=setting.longest,
        scheduler=setting.scheduler,
        host_blocks=HOST_TIMES * setting.num_blocks if policy.between is Between.PARK else 0,
        mover=CostMover(clock, setting.costs),
        pin_quota=1.0 if policy.between is Between.HOLD else 0.0,
        clock=clock,
        timer=clock,
    )
    player = Player(engine, clock, policy, Meter(since=since), longest=setting.longest)
    return Simulated(engine, clock, player)


def _finish(
    load: float, clock: Clock, player: Player, setting: Setting, *, until: float
) -> Outcome:
    patience = PATIENCE * setting.limits.first_token
    went_on = player.run(until, patience)
    player.count_waiting()
    meter, view = player.meter, player.view()
    return Outcome(
        load=load,
        is_met=went_on and meter.meets(setting.limits),
        first_token=percentile(meter.first_tokens),
        next_token=percentile(meter.next_tokens),
        num_turns=meter.num_turns,
        tokens_per_second=meter.num_tokens / meter.seconds if meter.seconds else 0.0,
        given=meter.given,
        filled=meter.filled,
        filled_of_allocated=meter.filled_of_allocated,
        num_preempted=view.num_preemptions,
        num_refused=meter.num_refused,
        given_when_refused=meter.given_when_refused,
        computed_tokens=view.computed_tokens,
        peak_active=player.peak_active,
        moments=tuple(meter.moments),
    )
