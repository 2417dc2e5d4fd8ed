"""How large the pool is, and the tiers below it, once that is known in blocks."""

from dataclasses import dataclass

from agentkv.config.requirement import require


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolConfig:
    """Sizes of the device pool and of the tiers below it."""

    num_blocks: int
    """Blocks of the device pool, at least 1."""
    block_size: int = 16
    """Token positions per block, at least 1."""
    host_blocks: int = 0
    """Blocks of the host tier; 0: KV that gives way is recomputed."""
    disk_blocks: int = 0
    """Blocks of the disk tier, below the host's."""

    def __post_init__(self) -> None:
        require(self.host_blocks >= 0, "host_blocks must not be negative.")
        require(
            self.disk_blocks == 0 or (self.disk_blocks > 0 and self.host_blocks > 0),
            "disk_blocks must not be negative, and a disk tier needs a host tier above it.",
        )
        require(self.num_blocks >= 1, f"num_blocks must be at least 1, got {self.num_blocks}.")
        require(self.block_size >= 1, f"block_size must be at least 1, got {self.block_size}.")
