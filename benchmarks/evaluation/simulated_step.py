"""A step that takes the time a cost model says: a runner without a model, and the clock it moves.

The batch is what the real scheduler made, so what a policy shares or repeats shows in the work.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from agentkv.core.batch import Batch, StepResult
from agentkv.core.block_move import BlockMove, Place
from agentkv.core.step_cost import StepCost, StepWork
from benchmarks.hollow_runner import HollowRunner


class Clock:
    """Seconds since the start of a run; moved by whoever takes time."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        """Reads it."""
        return self.now


class Costs(NamedTuple):
    """Seconds of whatever takes time."""

    step: StepCost
    """Of a step that runs the model."""
    bare: float
    """Of a step that has all its logits already, and samples only."""
    move: float
    """Of carrying one block to the host, or back."""

    def seconds(self, work: StepWork) -> float:
        """Predicts one step."""
        return self.step.seconds(work) if work.num_rows else self.bare


class CostRunner(HollowRunner):
    """Answers with tokens that mean nothing, after the seconds its work would take."""

    def __init__(self, clock: Clock, costs: Costs) -> None:
        super().__init__()
        self._clock = clock
        self._costs = costs

    def run(self, batch: Batch, meanwhile: Callable[[], None]) -> StepResult:
        """Moves the clock by the step's cost."""
        self._clock.now += self._costs.seconds(work_of(batch))
        return super().run(batch, meanwhile)


class CostMover:
    """Carries blocks to the host and back in the seconds that it would take; nothing is carried."""

    def __init__(self, clock: Clock, costs: Costs) -> None:
        self._clock = clock
        self._costs = costs

    def move(self, moves: Sequence[BlockMove]) -> Sequence[BlockMove]:
        """Moves the clock; no move fails."""
        self._clock.now += len(moves) * self._costs.move
        return ()

    def fetch(self, places: Sequence[Place]) -> None:
        """There is no disk to read from."""
        assert not places

    def fetched(self, wait: float) -> Sequence[Place]:
        """Answers nothing."""
        return ()

    def close(self) -> None:
        """There is nothing to give back."""


def work_of(batch: Batch) -> StepWork:
    """Counts the rows of a batch, the KV tokens they read, and the reads."""
    distinct = read = 0
    for run in batch.runs:
        size = run.end - run.start
        distinct += size
        positions = batch.positions[run.first_row : run.first_row + run.num_rows]
        if positions[0] >= run.end:
            read += run.num_rows * size
        else:  # rows of a chunk read one another, up to themselves
            read += sum(min(run.end, position + 1) - run.start for position in positions)
    return StepWork(batch.num_rows, distinct, read)
