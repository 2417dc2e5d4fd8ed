"""What a server says about contexts, blocks and tokens: frozen values.

Fields are named as on the wire. This module knows no message and no connection.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum


class Residency(StrEnum):
    """Where a context's KV is."""

    UNKNOWN = "unknown"
    """A newer server names a place this client does not know."""
    DEVICE = "device"
    """Every computed token has its KV on the device."""
    HOST = "host"
    """All KV is kept, some of it in host memory; the next use brings it back."""
    DISK = "disk"
    """All KV is kept, some of it on disk; the next use brings it back."""
    PARTIAL = "partial"
    """Some KV gave way; the rest is recomputed at the next use."""
    NONE = "none"
    """Tokens only; the next use recomputes all KV."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens that requests ran, reused and made."""

    computed_tokens: int = 0
    """Tokens the model ran."""
    cached_tokens: int = 0
    """Tokens whose KV was there, and so were not run."""
    generated_tokens: int = 0
    """Tokens sampled and committed."""

    def __add__(self, other: "Usage") -> "Usage":
        """Sums two usages field by field."""
        return Usage(
            self.computed_tokens + other.computed_tokens,
            self.cached_tokens + other.cached_tokens,
            self.generated_tokens + other.generated_tokens,
        )


@dataclass(frozen=True, slots=True)
class PoolInfo:
    """Blocks of the server's device pool; free + live + cached = total."""

    total_blocks: int
    free_blocks: int
    live_blocks: int
    """Held by contexts whose KV is kept."""
    cached_blocks: int
    """Prefix cache, and KV of contexts that gave way: reclaimable at once."""
    pinned_blocks: int
    """Part of `live_blocks` that no pressure can move."""
    block_size: int
    """Token positions per block."""
    used_slots: int
    """Token positions of live and cached blocks that hold a token's KV."""
    host_total_blocks: int = 0
    """Blocks of the host tier, where KV goes that leaves the device; 0 without one."""
    host_free_blocks: int = 0
    host_live_blocks: int = 0
    """With KV of contexts: parked, or gave way."""
    disk_total_blocks: int = 0
    """Blocks of disk, below the host; 0 without one."""
    disk_free_blocks: int = 0
    disk_live_blocks: int = 0


@dataclass(frozen=True, slots=True)
class ContextInfo:
    """One context as its owner sees it, at the moment of the answer."""

    id: str
    parent_id: str | None
    """The context it was forked from, which may be released by now; None for a created one."""
    fork_position: int
    """Tokens it shared with its parent when it was forked; 0 for a created one."""
    root_id: str
    """The created context it descends from, which may be released by now."""
    depth: int
    """Forks between it and that root."""
    length: int
    """Committed tokens."""
    num_computed_tokens: int
    """Committed tokens whose KV is on the device, in [0, length]."""
    private_blocks: int
    """Blocks that releasing this context would free."""
    shared_blocks: int
    """Blocks of this context that other contexts hold too."""
    host_blocks: int
    """Blocks of this context whose KV is in the server's host memory."""
    disk_blocks: int
    """Blocks of this context whose KV is on the server's disk."""
    residency: Residency
    pinned: bool
    """Whether its KV stays on the device whatever the pressure."""
    has_head_logits: bool
    """Whether the next generate samples its first token without computing anything."""
    busy: bool
    """Whether a request is changing it."""
    num_children: int
    """Living contexts forked from it."""
    labels: Mapping[str, str]
    create_time: datetime
    """When it was made, by the server's clock, in UTC."""


@dataclass(frozen=True, slots=True)
class Extension:
    """What an extend did."""

    length: int
    """Committed tokens after it."""
    usage: Usage
    logprobs: tuple[float, ...] = ()
    """Natural logarithm of each appended token's probability, when asked for."""


@dataclass(frozen=True, slots=True)
class ContinuationScore:
    """Log-probabilities of one continuation, natural logarithm, one per token."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    total: float
    """Log-probability of the whole continuation: the sum of `logprobs`."""

    @property
    def mean(self) -> float:
        """Log-probability per token: compares continuations of different lengths."""
        return self.total / len(self.logprobs)


@dataclass(frozen=True, slots=True)
class Released:
    """What a release gave back."""

    num_released: int = 0
    """Contexts released, those below included."""
    blocks_freed: int = 0
    """Blocks no context holds any more: free, or cached until needed."""

    def __add__(self, other: "Released") -> "Released":
        """Sums two releases."""
        return Released(
            self.num_released + other.num_released, self.blocks_freed + other.blocks_freed
        )
