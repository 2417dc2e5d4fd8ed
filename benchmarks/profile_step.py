"""Where the time of a step of decoding goes on this machine: products, attention, the rest.

Branches decode over one shared prefix, in process. The methods of each part are timed from outside,
part within part, and a part's own time is what its inner parts leave. Timing costs about a
microsecond a call, some hundred calls a step.
"""

import argparse
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from agentkv.config import WEIGHT_NAMES, EngineConfig
from agentkv.engine.build import build_engine
from agentkv.engine.engine import Engine
from agentkv.sampling_params import SamplingParams
from benchmarks.report import Report, Result, Target, parser_for

TENANT = "benchmark"
ROWS = (1, 16, 32)
PREFIX = 1024
TARGETS_MS = {1: 14.0, 16: 50.0, 32: 50.0}
"""Milliseconds of a step, by its rows."""


class Stopwatch:
    """Sums the own time of nested parts."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._inner = [0.0]

    def wrap(self, owner: Any, method: str, part: str) -> None:
        """Times every call of an object's method."""
        original: Callable[..., Any] = getattr(owner, method)

        def timed(*arguments: Any, **options: Any) -> Any:
            with self.part(part):
                return original(*arguments, **options)

        setattr(owner, method, timed)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Times a block, without what parts inside it take."""
        self._inner.append(0.0)
        begin = time.perf_counter()
        try:
            yield
        finally:
            spent = time.perf_counter() - begin
            self.seconds[name] += spent - self._inner.pop()
            self._inner[-1] += spent


def main() -> None:
    """Profiles steps of several sizes and publishes the report."""
    parser = parser_for(__doc__ or "")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--weights", default="auto", choices=WEIGHT_NAMES)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--prefix", type=int, default=PREFIX, help="tokens all branches share")
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS, help="branches that decode")
    parser.add_argument("--steps", type=int, default=24, help="steps measured for each")
    options = parser.parse_args()
    engine = build_engine(
        EngineConfig(
            model=options.model,
            weights=options.weights,
            num_threads=options.threads,
            num_blocks=2 * options.prefix // 16 + 4 * max(options.rows) + 64,
        )
    )
    watch = Stopwatch()
    _watch(engine, watch)
    results, targets = [], []
    for rows in options.rows:
        measured = list(_profile(engine, watch, rows, options))
        results += measured
        if rows in TARGETS_MS and options.prefix == PREFIX:
            name = f"a step of {rows} rows over {PREFIX} tokens, ms"
            targets.append(Target.at_most(name, measured[0].median, TARGETS_MS[rows]))
    Report("profile_step", tuple(results), tuple(targets)).publish(options.json)


def _watch(engine: Any, watch: Stopwatch) -> None:
    """Wraps the parts of a step; reaches into their owners, since nobody else wants to."""
    runner = engine._loop._runner
    model = runner._model
    watch.wrap(engine._scheduler, "schedule", "schedule")
    watch.wrap(engine._scheduler, "update", "update")
    watch.wrap(runner, "run", "runner")
    watch.wrap(runner._planner, "plan", "plan")
    watch.wrap(runner._sampler, "sample", "sampler")
    watch.wrap(runner._step, "attend", "attention")
    watch.wrap(model, "forward", "model: embedding, norm, rotary, Python")
    watch.wrap(model.get_output_embeddings(), "forward", "head")
    for layer in model.model.layers:
        watch.wrap(layer, "forward", "layers without attention")


def _profile(
    engine: Engine, watch: Stopwatch, rows: int, options: argparse.Namespace
) -> Iterator[Result]:
    """Decodes with so many branches; gives the whole step's time, then each part's."""
    tokens = [(7 * index) % 20_000 + 100 for index in range(options.prefix)]
    root = engine.run(engine.contexts.create(TENANT, tokens)).answer.context
    params = SamplingParams(max_tokens=options.steps + 9, ignore_eos=True)
    generation = engine.inference.generate_branches(TENANT, root.id, rows, params)
    steps: list[dict[str, float]] = []
    while not generation.is_done:
        watch.seconds.clear()
        with watch.part("loop"):
            engine.step()
        generation.take_news()
        steps.append(dict(watch.seconds))
    engine.contexts.release(TENANT, [root.id], recursive=True)
    steps = steps[4 : 4 + options.steps]
    workload = f"{rows} rows over {options.prefix}"
    label = engine.facts.weights
    whole = [1e3 * sum(step.values()) for step in steps]
    yield Result.of(workload, label, "step", "ms", whole)
    for part in sorted(steps[0], key=lambda part: -steps[0][part]):
        yield Result.of(workload, label, part, "ms", [1e3 * step.get(part, 0.0) for step in steps])


if __name__ == "__main__":
    main()
