"""What the engine asks of a model. Tests pass a runner and a mover that need no tensor."""

from collections.abc import Callable, Sequence
from typing import Protocol

from agentkv.core.batch import Batch, StepResult
from agentkv.core.block_move import BlockMove, Place


class Runner(Protocol):
    """Computes one step."""

    def run(self, batch: Batch, meanwhile: Callable[[], None]) -> StepResult:
        """Does the copies, writes and reads KV, samples; answers in the order of the batch.

        Args:
            batch: Of the step.
            meanwhile: Called once, when there is nothing left to do but to wait for processor or
                device; quick, and never fails.
        """
        ...


class Mover(Protocol):
    """Carries KV between tiers."""

    def move(self, moves: Sequence[BlockMove]) -> Sequence[BlockMove]:
        """Does the moves in order, as seen by the next step; cannot raise.

        Returns:
            The moves that failed: their destination holds nothing that may be read.
        """
        ...

    def fetch(self, places: Sequence[Place]) -> None:
        """Begins to read disk blocks ahead, in the background."""
        ...

    def fetched(self, wait: float) -> Sequence[Place]:
        """Answers the places whose reading has ended since the last call, well or not.

        Args:
            wait: Seconds to wait at most while there is none.
        """
        ...

    def close(self) -> None:
        """Gives back what outlives a step, such as files. Closing twice is fine."""
        ...
