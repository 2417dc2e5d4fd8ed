"""How many agent sessions at once, at which waiting times, in which memory; by contestant.

    python -m benchmarks.sessions --data PATH [--json FILE] [--png FILE]
        [--measured FILE] [--quick]

Contestants differ in policy alone: they run in the same engine and scheduler, paged with sharing,
paged without, and with contiguous reservations as in the PagedAttention paper (Orca-style with
maximum, next power of two and oracle length; FasterTransformer-style, by whole requests). First a
few sessions run on SmolLM2-135M, whose steps give the cost of a step; then everything is repeated
at scale in simulated time, where the real scheduler plans each step and the cost says how long it
takes. `--measured` takes the real part from an earlier report.

Traffic: agents' sessions with their tool pauses and sub-agents (lengths divided by 32, times
kept), chat requests with the arrivals of a trace (lengths kept up to 2,048 tokens, times stretched
to a rate) with one branch and with four, and chat requests that share prefixes (lengths divided by
32). `evaluation/traces.py` names the files and where they are from.
"""

from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

from agentkv.config import SchedulerConfig
from agentkv.core.step_cost import StepCost
from benchmarks.evaluation import real_run
from benchmarks.evaluation.meters import Limits
from benchmarks.evaluation.plots import Bars, Lines, draw
from benchmarks.evaluation.policies import (
    CONTESTANTS,
    SHARING,
    Between,
    Policy,
    Reserve,
)
from benchmarks.evaluation.runs import (
    Outcome,
    Setting,
    most,
    play_mixed,
    play_requests,
    play_sessions,
)
from benchmarks.evaluation.simulated_step import Costs
from benchmarks.evaluation.traces import (
    Arrival,
    Length,
    Script,
    azure_requests,
    claude_sessions,
    mooncake_requests,
)
from benchmarks.report import Report, Result, Target, parser_for

LIMITS = Limits(first_token=2.0, next_token=0.2)
CHAT_LIMITS = Limits(first_token=5.0, next_token=0.2)
"""Without sharing, four branches compute a long prompt four times: nobody could in 2 s."""
AGENTS = "agents, most sessions"
CHAT = {1: "chat, 1 branch, most requests/s", 4: "chat, 4 branches, most requests/s"}
PREFIXES = "chat with shared prefixes, most requests/s"
SMALLEST = 0.25 / 64
"""Smallest rate that is tried: whoever cannot serve it is taken to."""
MIXED = "all traffic mixed"
OVERFULL = "agents, twice as many as can be held"
SESSIONS_OVER_MAXIMUM = 3.0
THROUGHPUT_OVER_RESERVING = 2.0
PARKING_OVER_HOLDING = 1.5
FILLED = 0.985
GIVEN_WHEN_REFUSED = 0.9
USUAL = Costs(StepCost(4.2e-3, 2.8e-4, 3.2e-6, 1.9e-7), 2.4e-4, 2e-4)
"""What `--quick` takes for granted rather than measure."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How much to simulate."""

    agent_blocks: int = 4096
    """Eight contexts of maximum length."""
    chat_blocks: int = 1024
    """The same with the shorter maximum of chats."""
    agent_longest: int = 8192
    chat_longest: int = 2048
    ramp: float = 120.0
    measured: float = 240.0
    num_requests: int = 250
    most_load: float = 4096.0
    """Largest number of sessions, or rate, that is tried."""
    divisor: int = 32
    """Of the agents' lengths, and of those with shared prefixes."""


QUICK = Plan(agent_blocks=64, chat_blocks=64, agent_longest=512, chat_longest=256, ramp=2.0,
             measured=5.0, num_requests=12, most_load=8.0)  # fmt: skip


class Job(NamedTuple):
    """One search for the most that one contestant serves."""

    workload: str
    policy: Policy
    setting: Setting
    traffic: Sequence[Script] | Sequence[Arrival]

    def run(self) -> Outcome:
        """Searches."""
        limit = self.setting.most_load
        if self.workload == AGENTS:
            return most(partial(_sessions, self), 4, whole=True, limit=limit)
        return most(partial(_requests, self), 0.25, whole=False, limit=limit)


def main() -> None:
    """Measures, simulates, prints one table and writes what is asked for."""
    parser = parser_for(__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder of the traces")
    parser.add_argument("--png", type=Path, help="where to draw it; needs matplotlib")
    parser.add_argument("--measured", type=Path, help="report with the real part of a run before")
    parser.add_argument("--real-only", action="store_true", help="leave out the simulation")
    parser.add_argument("--jobs", type=int, default=1, help="processes that simulate")
    parser.add_argument("--quick", action="store_true", help="small sizes: does it run at all?")
    options = parser.parse_args()
    plan = QUICK if options.quick else Plan()
    results: list[Result] = []
    if options.quick:
        costs = USUAL
    elif options.measured:
        costs, results = real_run.read(options.measured)
    else:
        scripts = claude_sessions(options.data, Length(2 * plan.divisor, real_run.LONGEST))
        costs, results = real_run.measure(scripts, SchedulerConfig())
    if options.real_only:
        Report("sessions", tuple(results)).publish(options.json)
        return
    jobs = jobs_of(options.data, plan, costs)
    with ProcessPoolExecutor(options.jobs) as pool:
        outcomes = list(pool.map(Job.run, jobs))
    found = {
        (job.workload, job.policy): outcome for job, outcome in zip(jobs, outcomes, strict=True)
    }
    extra = _mixed(options.data, plan, costs), _refused(jobs, found)
    results += [result for key, outcome in found.items() for result in _results(*key, outcome)]
    results += _results(MIXED, SHARING.then(Between.RETAIN), extra[0])
    results += _results(OVERFULL, SHARING.then(Between.HOLD), extra[1])
    Report("sessions", tuple(results), targets(found, *extra)).publish(options.json)
    if options.png:
        draw(panels(found), options.png)


def jobs_of(data: Path, plan: Plan, costs: Costs) -> list[Job]:
    """Lists every search: each contestant under each traffic, agents' also by what is kept."""
    agents = Setting(costs, LIMITS, plan.agent_blocks, plan.agent_longest, plan.ramp, plan.measured)
    agents = replace(agents, most_load=plan.most_load)
    chats = replace(
        agents, limits=CHAT_LIMITS, num_blocks=plan.chat_blocks, longest=plan.chat_longest
    )
    scripts = claude_sessions(data, Length(plan.divisor, plan.agent_longest))
    jobs = []
    for policy in CONTESTANTS:
        kept: tuple[Between, ...] = (Between.HOLD,)
        if policy.by_request:
            kept = ()  # its batches end with the call
        elif policy.reserve is None:
            kept = (Between.RETAIN, Between.HOLD)
        if policy is SHARING:
            kept = (*kept, Between.PARK)
        jobs += [
            Job(AGENTS, policy.then(between), agents, scripts) for between in (Between.FREE, *kept)
        ]
    traffic = {
        workload: azure_requests(data, Length(1, plan.chat_longest), branches=branches)
        for branches, workload in CHAT.items()
    }
    traffic[PREFIXES] = mooncake_requests(data, Length(plan.divisor, plan.chat_longest))
    for workload, requests in traffic.items():
        some = requests[: plan.num_requests]
        jobs += [Job(workload, policy, chats, some) for policy in CONTESTANTS]
    return jobs


def targets(
    found: dict[tuple[str, Policy], Outcome], mixed: Outcome, refused: Outcome
) -> tuple[Target, ...]:
    """Sets what was found against what was meant."""

    def best(workload: str, *, reserve: Reserve | None, shares: bool) -> float:
        return max(
            outcome.load
            for (where, policy), outcome in found.items()
            if (where, policy.reserve, policy.shares, policy.by_request)
            == (workload, reserve, shares, False)
        )

    def ratio(workload: str, reserve: Reserve) -> float:
        theirs = best(workload, reserve=reserve, shares=False)
        return best(workload, reserve=None, shares=True) / max(theirs, SMALLEST)

    held, parked = (
        found[AGENTS, SHARING.then(between)].load for between in (Between.HOLD, Between.PARK)
    )
    return (
        Target.at_least("allocated slots that hold a token, all traffic mixed",
                        mixed.filled_of_allocated, FILLED),
        Target.at_least("agents' sessions over reserving the maximum length",
                        ratio(AGENTS, Reserve.MAXIMUM), SESSIONS_OVER_MAXIMUM),
        *(
            Target.at_least(f"requests/s over reserving the {form}, {branches} branches",
                            ratio(workload, form), THROUGHPUT_OVER_RESERVING)
            for branches, workload in CHAT.items() for form in Reserve
        ),
        Target.at_least("agents' sessions parked over held",
                        parked / held if held else 0.0, PARKING_OVER_HOLDING),
        Target.at_least("share of blocks given at the first refusal",
                        refused.given_when_refused or 0.0, GIVEN_WHEN_REFUSED),
    )  # fmt: skip


def panels(found: dict[tuple[str, Policy], Outcome]) -> list[Bars | Lines]:
    """Prepares the plot: the loads by traffic, and the pool over time under the agents' load."""
    drawn: list[Bars | Lines] = []
    for workload in (AGENTS, *CHAT.values(), PREFIXES):
        loads = {
            _label(workload, policy): outcome.load
            for (where, policy), outcome in found.items()
            if where == workload
        }
        drawn.append(Bars(workload, "sessions" if workload == AGENTS else "requests/s", loads))
    lines = {
        _label(AGENTS, policy): [(moment.time, moment.filled) for moment in outcome.moments]
        for (where, policy), outcome in found.items()
        if where == AGENTS and policy.between is Between.HOLD
    }
    return [*drawn, Lines("agents held: slots with KV", "share of the pool", lines)]


def _sessions(job: Job, load: float) -> Outcome:
    scripts = [script for script in job.traffic if isinstance(script, Script)]
    return play_sessions(round(load), scripts, job.policy, job.setting)


def _requests(job: Job, load: float) -> Outcome:
    arrivals = [arrival for arrival in job.traffic if isinstance(arrival, Arrival)]
    return play_requests(load, arrivals, job.policy, job.setting)


def _mixed(data: Path, plan: Plan, costs: Costs) -> Outcome:
    """Plays agents, chats with four branches and chats with shared prefixes in one pool."""
    setting = Setting(
        costs, LIMITS, plan.agent_blocks, plan.agent_longest, plan.ramp, plan.measured
    )
    scripts = claude_sessions(data, Length(plan.divisor, plan.agent_longest))
    chats = azure_requests(data, Length(1, plan.chat_longest), branches=4)
    prefixes = mooncake_requests(data, Length(plan.divisor, plan.chat_longest))
    some = plan.num_requests // 5
    pairs = zip(chats[:some], prefixes[:some], strict=False)
    requests = [request for pair in pairs for request in pair]
    num = max(1, plan.agent_blocks // 256)
    return play_mixed(num, scripts, requests, SHARING.then(Between.RETAIN), setting)


def _refused(jobs: Sequence[Job], found: dict[tuple[str, Policy], Outcome]) -> Outcome:
    """Plays twice as many held sessions as there is room for, to see the first refusal."""
    held = SHARING.then(Between.HOLD)
    job = next(job for job in jobs if (job.workload, job.policy) == (AGENTS, held))
    return _sessions(job, 2 * max(1.0, found[AGENTS, held].load))


def _label(workload: str, policy: Policy) -> str:
    is_agents = workload in (AGENTS, MIXED, OVERFULL)
    return f"{policy.name}, {policy.between}" if is_agents else policy.name


def _results(workload: str, policy: Policy, outcome: Outcome) -> list[Result]:
    unit = "sessions" if workload in (AGENTS, MIXED, OVERFULL) else "1/s"
    values = (
        ("load", unit, outcome.load),
        ("p95 to first token", "s", outcome.first_token),
        ("p95 to next token", "s", outcome.next_token),
        ("tokens generated per second", "1/s", outcome.tokens_per_second),
        ("pool given, mean", "1", outcome.given),
        ("pool's slots with a token, mean", "1", outcome.filled),
        ("allocated slots with a token, mean", "1", outcome.filled_of_allocated),
        ("preemptions", "requests", outcome.num_preempted),
        ("refusals", "calls", outcome.num_refused),
        ("calls at once, most", "calls", outcome.peak_active),
        ("tokens computed", "tokens", outcome.computed_tokens),
    )
    label = _label(workload, policy)
    return [Result.of(workload, label, name, unit, [value]) for name, unit, value in values]


if __name__ == "__main__":
    main()
