"""What the engine asks of a model: one method. Tests pass a runner that needs no tensor."""

from typing import Protocol

from agentkv.core.batch import Batch, StepResult


class Runner(Protocol):
    """Computes one step."""

    def run(self, batch: Batch) -> StepResult:
        """Does the copies, writes and reads KV, samples; answers in the order of the batch."""
        ...
