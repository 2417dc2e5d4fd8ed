"""What observers see: frozen values that cross layers instead of the objects behind them."""

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from agentkv.core.lease import Lease, LeaseMode
from agentkv.core.pressure import PressureLevel


class Residency(StrEnum):
    """Where a context's KV is."""

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


class Usage(NamedTuple):
    """Tokens one request ran, reused and made."""

    computed_tokens: int = 0
    """Rows the model ran for this request."""
    cached_tokens: int = 0
    """Tokens whose KV was there when the request began, and so were not run."""
    generated_tokens: int = 0
    """Tokens sampled and committed."""
    drafted_tokens: int = 0
    """Tokens guessed ahead, each a row of its own."""
    accepted_tokens: int = 0
    """Part of them that was right, and is part of `generated_tokens`."""

    def __add__(self, other: object) -> "Usage":
        """Sums two usages field by field."""
        assert isinstance(other, Usage)
        return Usage(*(mine + its for mine, its in zip(self, other, strict=True)))


class TierView(NamedTuple):
    """Blocks of a tier below the device pool; free + live + cached = total."""

    total: int = 0
    """0: there is no such tier."""
    free: int = 0
    live: int = 0
    """KV of contexts: parked, or gave way."""
    cached: int = 0
    """Prefix cache."""


NO_TIER = TierView()


@dataclass(frozen=True, slots=True)
class PoolView:
    """Blocks of the device pool; free + live + cached = total."""

    total: int
    free: int
    live: int
    """Held by contexts whose KV is kept."""
    cached: int
    """Prefix cache, and KV of contexts that gave way: reclaimable at once."""
    pinned: int
    """Part of `live` that no pressure can move."""
    block_size: int
    used_slots: int
    """Slots of live and cached blocks that hold a token's KV."""
    reclaimable: int
    """Blocks that give way to a request: `cached`, and those of idle contexts without a pin."""
    level: PressureLevel
    host: TierView = NO_TIER
    disk: TierView = NO_TIER

    @property
    def waste(self) -> float:
        """Share of allocated slots that hold no token, in [0, 1)."""
        allocated = (self.live + self.cached) * self.block_size
        return 1 - self.used_slots / allocated if allocated else 0.0


@dataclass(frozen=True, slots=True)
class ContextView:
    """One context as its owner sees it."""

    id: str
    parent_id: str | None
    """The context it was forked from, which may be released by now; None for a created one."""
    fork_position: int
    """Tokens it shared with its parent when forked; 0 for a created one."""
    root_id: str
    """The created context it descends from."""
    depth: int
    """Forks between it and that root."""
    length: int
    """Committed tokens."""
    num_computed: int
    """Committed tokens whose KV is on the device."""
    private_blocks: int
    """Blocks that releasing this context would free."""
    shared_blocks: int
    """Blocks of its path that other contexts hold too."""
    reclaimable_blocks: int
    """Blocks of its path that give way to requests as things are, private and shared ones."""
    host_blocks: int
    """Blocks of its path whose KV is in host memory."""
    disk_blocks: int
    """Blocks of its path whose KV is on disk."""
    residency: Residency
    lease: Lease
    """What was granted."""
    expire_time: float | None
    """When the lease expires unless it is used, in seconds since the epoch; None once it has."""
    has_head_logits: bool
    """Whether the next Generate samples without computing anything first."""
    is_busy: bool
    """Whether a request is changing it."""
    num_children: int
    """Living contexts forked from it."""
    labels: tuple[tuple[str, str], ...]
    create_time: float
    """Seconds since the epoch."""
    adapter: str = ""
    """The adapter it is computed with; empty: the model's own weights."""

    @property
    def pinned(self) -> bool:
        """Whether its KV stays on the device whatever the pressure."""
        return self.lease.mode is LeaseMode.PIN


class ContextPage(NamedTuple):
    """Part of a list."""

    contexts: tuple[ContextView, ...]
    next_page_token: str
    """Continues the list; empty at its end."""
