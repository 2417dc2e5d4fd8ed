"""What a server says about contexts, blocks and tokens: frozen values.

Fields are named as on the wire. This module knows no message and no connection.
"""

from collections.abc import Mapping, Sequence
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


class LeaseMode(StrEnum):
    """How firmly KV is kept while no request runs on its context."""

    UNKNOWN = "unknown"
    """A newer server names a mode this client does not know."""
    RETAIN = "retain"
    """While there is room: gives way to requests, least recently used first."""
    PIN = "pin"
    """On the device whatever the pressure; counts against a quota."""
    PARK = "park"
    """A tool is running: gives way before what is retained; ends with the next use."""
    DROPPABLE = "droppable"
    """Not counted on: the first to give way."""


class LeaseReduction(StrEnum):
    """Why less was granted than asked for."""

    UNKNOWN = "unknown"
    """A newer server names a cause this client does not know."""
    PIN_QUOTA = "pin_quota"
    """The pins are used up, or a pinned context outgrew them: it is retained, not pinned."""
    MAX_TTL = "max_ttl"
    """The time asked for was above the limit."""


class PressureLevel(StrEnum):
    """How hard it is to have a block."""

    UNKNOWN = "unknown"
    """A newer server names a level this client does not know."""
    OK = "ok"
    """Blocks are free, or cache that nobody counts on."""
    SOFT = "soft"
    """Most blocks are held by contexts: idle ones are about to give way."""
    HARD = "hard"
    """Most blocks are held by running requests and pins: what comes now may wait or be refused."""


@dataclass(frozen=True, slots=True)
class LeaseOptions:
    """The lease a caller asks for."""

    mode: LeaseMode | None = None
    """None leaves it as it is; for a new context RETAIN, for a branch what its parent has."""
    ttl: float | None = None
    """Seconds without use after which it expires; None takes the server's default."""
    may_reduce: bool = False
    """Whether less is fine; without it, what cannot be granted fails the call."""


@dataclass(frozen=True, slots=True)
class LeaseInfo:
    """The lease that was granted."""

    mode: LeaseMode
    ttl: float
    """Seconds without use after which it expires."""
    expire_time: datetime | None
    """When it expires unless the context is used, in UTC; None once it has."""
    reductions: tuple[LeaseReduction, ...] = ()
    """Why it is less than was asked for; empty when it is all."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens that requests ran, reused and made."""

    computed_tokens: int = 0
    """Tokens the model ran."""
    cached_tokens: int = 0
    """Tokens whose KV was there, and so were not run."""
    generated_tokens: int = 0
    """Tokens sampled and committed."""
    drafted_tokens: int = 0
    """Tokens guessed ahead; each was run, and is part of `computed_tokens`."""
    accepted_tokens: int = 0
    """Guesses that were right, and are part of `generated_tokens`."""

    def __add__(self, other: "Usage") -> "Usage":
        """Sums two usages field by field."""
        return Usage(
            self.computed_tokens + other.computed_tokens,
            self.cached_tokens + other.cached_tokens,
            self.generated_tokens + other.generated_tokens,
            self.drafted_tokens + other.drafted_tokens,
            self.accepted_tokens + other.accepted_tokens,
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
    reclaimable_blocks: int
    """Blocks that give way to a request: cached ones, and those of idle contexts without a pin."""
    level: PressureLevel
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
    reclaimable_blocks: int
    """Blocks among private and shared ones that give way to requests as things are."""
    lease: LeaseInfo
    adapter: str = ""
    """The adapter it is computed with; empty: the model's own weights."""


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
class Choice:
    """Which of several continuations a model finds most likely."""

    index: int
    """Its place among those given; of equals the first."""
    scores: tuple[ContinuationScore, ...]
    """Of all, in the order given."""

    @property
    def score(self) -> ContinuationScore:
        """The chosen one's."""
        return self.scores[self.index]

    @classmethod
    def among(cls, scores: Sequence[ContinuationScore], *, by_mean: bool) -> "Choice":
        """Chooses by log-probability per token, or of the whole; at least one score."""
        values = [score.mean if by_mean else score.total for score in scores]
        return cls(values.index(max(values)), tuple(scores))


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
