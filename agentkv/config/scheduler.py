"""How much work one step may hold."""

import math
from dataclasses import dataclass

from agentkv.config.requirement import require


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """How much work one step may hold."""

    token_budget: int = 512
    """Most rows one step computes, decode rows and chunks together."""
    chunk_size: int = 256
    """Most tokens of one request that one step computes."""
    max_running: int = 256
    """Most requests that run at once."""
    max_waiting: int = 4096
    """Most requests that wait; one more is refused with QUEUE_FULL."""
    watermark: int = 0
    """Free blocks that admission leaves for requests that already run."""
    num_speculative_tokens: int = 0
    """Most tokens of a draft, for requests that do not say; 0 drafts for those alone that do."""
    fixed_rows: float = 12.0
    """What a step costs before its first row, in rows, as `benchmarks/step_cost.py` measures it:
    a draft is made where it is worth its rows."""

    def __post_init__(self) -> None:
        for name in ("token_budget", "chunk_size", "max_running", "max_waiting"):
            require(getattr(self, name) >= 1, f"{name} must be at least 1.")
        require(self.watermark >= 0, "watermark must not be negative.")
        require(self.num_speculative_tokens >= 0, "num_speculative_tokens must not be negative.")
        require(0 <= self.fixed_rows < math.inf, "fixed_rows must be finite and not negative.")
