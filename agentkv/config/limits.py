"""What one tenant or one call may ask for."""

from dataclasses import dataclass


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
    max_ended_trees: int = 10_000
    """Trees without a living context whose usage can still be asked for."""
