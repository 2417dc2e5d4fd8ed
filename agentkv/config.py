"""What an operator decides before start: frozen values, each checked once.

What a device or a model decides (dtype sizes, free memory) is an argument elsewhere, never an
edit of these.
"""

from dataclasses import dataclass

from agentkv.errors import InvalidRequest


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise InvalidRequest(message)


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolConfig:
    """Size of the device pool."""

    num_blocks: int
    """Blocks of the device pool, at least 1."""
    block_size: int = 16
    """Token positions per block, at least 1."""

    def __post_init__(self) -> None:
        _require(self.num_blocks >= 1, f"num_blocks must be at least 1, got {self.num_blocks}.")
        _require(self.block_size >= 1, f"block_size must be at least 1, got {self.block_size}.")


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

    def __post_init__(self) -> None:
        for name in ("token_budget", "chunk_size", "max_running", "max_waiting"):
            _require(getattr(self, name) >= 1, f"{name} must be at least 1.")
        _require(self.watermark >= 0, "watermark must not be negative.")


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitsConfig:
    """What one tenant or one call may ask for; each is checked before any work."""

    max_contexts: int = 100_000
    """Contexts one tenant may hold."""
    max_fork_count: int = 4096
    """Children of one Fork or GenerateBranches."""
    max_depth: int = 4096
    """Forks between a context and the root it descends from."""
    max_continuations: int = 1024
    """Continuations of one Score."""
    max_replies: int = 10_000
    """Answers remembered for repeated request ids."""
    reply_ttl: float = 600.0
    """Seconds for which an answer to a request id is remembered."""
