"""Sessions on a real model: real steps on a clock that skips what nobody waits for.

Owns how a real run is timed and what is learned from it: seconds by work, fitted by the same
line that the simulation then takes. Pauses of the trace pass in no time, all else is measured.
"""

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from agentkv.config import EngineConfig, SchedulerConfig
from agentkv.core.batch import Batch, StepResult
from agentkv.core.step_cost import StepCost, StepWork
from agentkv.engine.runner import Runner
from agentkv.engine.serving_model import ServingModel
from agentkv.model.loader import load_model
from benchmarks.evaluation.simulated_step import Clock, work_of

MODEL = "smollm2"
FEWEST_STEPS = 8


class RealClock(Clock):
    """Seconds that really pass, plus those that were skipped."""

    def __init__(self) -> None:
        self._skipped = 0.0
        self._start = time.perf_counter()

    @property
    def now(self) -> float:
        """Reads it."""
        return time.perf_counter() - self._start + self._skipped

    @now.setter
    def now(self, value: float) -> None:
        self._skipped += value - self.now


class StepTime(NamedTuple):
    """One step that ran."""

    work: StepWork
    seconds: float


class Fit(NamedTuple):
    """A cost, and how well it says what was measured."""

    cost: StepCost
    bare: float
    """Median seconds of a step that samples from logits that are there."""
    r_squared: float
    median_error: float
    """Of a step, as a share of its time."""
    total_error: float
    """Of all steps together: predicted over measured time, less 1."""
    num_steps: int


class TimedRunner:
    """Notes the work and the seconds of every step of another runner."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self.steps: list[StepTime] = []

    def run(self, batch: Batch, meanwhile: Callable[[], None]) -> StepResult:
        """Runs it, and notes how long it took."""
        start = time.perf_counter()
        result = self._runner.run(batch, meanwhile)
        self.steps.append(StepTime(work_of(batch), time.perf_counter() - start))
        return result


def real_runner(num_blocks: int, scheduler: SchedulerConfig) -> TimedRunner:
    """Loads the model as a server would, and times what it runs."""
    config = EngineConfig(model=MODEL, scheduler=scheduler)
    serving = ServingModel.prepare(load_model(MODEL), config, lambda _: None)
    return TimedRunner(serving.runner(num_blocks))


def fit_steps(steps: Sequence[StepTime]) -> Fit:
    """Fits seconds by least squares of relative errors; no part is let fall below zero.

    Steps without rows run no model, and are not part of the line.

    Steps that took more than three times what the line says ran while the machine did something
    else; they stay in the errors but not in the line.
    """
    bare = [step.seconds for step in steps if not step.work.num_rows]
    steps = [step for step in steps if step.work.num_rows]
    assert len(steps) >= FEWEST_STEPS
    works = np.array([(1, *step.work) for step in steps], dtype=np.float64)
    times = np.array([step.seconds for step in steps])
    found = _non_negative(works, times)
    usual = times <= 3 * (works @ found)
    found = _non_negative(works[usual], times[usual])
    predicted = works @ found
    unexplained = float(((times - predicted) ** 2).sum())
    spread = float(((times - times.mean()) ** 2).sum())
    return Fit(
        StepCost(*map(float, found)),
        float(np.median(bare)) if bare else 0.0,
        1 - unexplained / spread,
        float(np.median(np.abs(predicted - times) / times)),
        float(predicted.sum() / times.sum() - 1),
        len(steps),
    )


def _non_negative(works: np.ndarray, times: np.ndarray) -> np.ndarray:
    """Solves, and leaves out the parts that come out below zero, one after the other."""
    columns = list(range(works.shape[1]))
    while True:
        weighted = works[:, columns] / times[:, None]
        found, *_ = np.linalg.lstsq(weighted, np.ones(len(times)), rcond=None)
        if (found >= 0).all():
            result = np.zeros(works.shape[1])
            result[columns] = found
            return result
        del columns[int(found.argmin())]
