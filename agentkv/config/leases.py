"""For how long, and how firmly, KV may be kept."""

from dataclasses import dataclass

from agentkv.config.requirement import require


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseConfig:
    """For how long, and how firmly, KV may be kept for a tenant."""

    default_ttl: float = 3600.0
    """Seconds without use after which a lease expires that names no time."""
    max_ttl: float = 86_400.0
    """Most seconds a lease may be asked for."""
    pin_quota: float = 0.5
    """Share of the pool, in [0, 1], that one tenant may pin."""
    handle_retention: float = 86_400.0
    """Seconds without use after which a context is released, whatever its lease."""
    unclaimed_retention: float = 600.0
    """The same for a context whose creator went away before the answer; a repeat of the call
    within that time gets it."""
    warning: float = 30.0
    """Seconds before a lease expires at which watchers are told."""

    def __post_init__(self) -> None:
        for name in ("default_ttl", "max_ttl", "handle_retention", "unclaimed_retention"):
            value = getattr(self, name)
            require(0 < value < float("inf"), f"{name} must be finite and above 0, got {value}.")
        require(
            self.default_ttl <= self.max_ttl,
            f"default_ttl {self.default_ttl:g} must not be above max_ttl {self.max_ttl:g}.",
        )
        require(0 <= self.pin_quota <= 1, f"pin_quota must be in [0, 1], got {self.pin_quota}.")
        require(self.warning >= 0, f"warning must not be negative, got {self.warning}.")

    def max_pinned(self, num_blocks: int) -> int:
        """Says how many blocks of a pool one tenant may pin."""
        return int(self.pin_quota * num_blocks)
