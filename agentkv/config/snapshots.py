"""Where saved contexts are kept."""

from dataclasses import dataclass

from agentkv.config.requirement import require


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotConfig:
    """Where saved contexts are kept, and how much of them."""

    dir: str | None = None
    """Folder of the snapshots; None refuses Save and Restore."""
    max_bytes: int = 16 << 30
    """Bytes that the snapshots of one tenant may take."""
    max_count: int = 1000
    """Snapshots that one tenant may keep."""

    def __post_init__(self) -> None:
        for name in ("max_bytes", "max_count"):
            require(getattr(self, name) >= 1, f"{name} of snapshots must be at least 1.")
