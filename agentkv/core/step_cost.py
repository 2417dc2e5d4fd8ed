"""How long a step takes, as a straight line in what it reads and computes.

Owns the formula. It is fitted to measured steps by `benchmarks/step_cost.py`, and is there for
whoever must weigh a step before it is run; it knows neither a clock nor a model.
"""

from dataclasses import dataclass
from typing import NamedTuple


class StepWork(NamedTuple):
    """What a step computes and reads."""

    num_rows: int
    """Tokens run through the model."""
    distinct_tokens: int
    """KV tokens read by any row, each counted once."""
    read_tokens: int
    """The same, each counted once for every row that reads it: the arithmetic of attention."""


@dataclass(frozen=True, slots=True)
class StepCost:
    """Seconds of a step: a fixed part, and a part for each row, token and read."""

    fixed: float
    per_row: float
    per_distinct_token: float
    """What loading a token's KV costs, however many rows read it."""
    per_read_token: float
    """What it costs to attend one row to one token."""

    def seconds(self, work: StepWork) -> float:
        """Predicts one step."""
        return (
            self.fixed
            + self.per_row * work.num_rows
            + self.per_distinct_token * work.distinct_tokens
            + self.per_read_token * work.read_tokens
        )

    def per_shared_token(self, num_rows: int) -> float:
        """Predicts what one more token costs that so many rows share."""
        return self.per_distinct_token + self.per_read_token * num_rows
