"""What contexts have used, and a tenant's quotas: frozen values, named as on the wire."""

from dataclasses import dataclass
from enum import StrEnum


class Tier(StrEnum):
    """Where blocks are."""

    UNKNOWN = "unknown"
    """A newer server names a place this client does not know."""
    DEVICE = "device"
    HOST = "host"
    DISK = "disk"


@dataclass(frozen=True, slots=True)
class Bill:
    """What was used. A block that n contexts hold costs each of them 1/n block-second a second."""

    computed_tokens: int
    """Tokens the model ran."""
    reused_tokens: int
    """Tokens whose KV a context found at its first use, from prefix cache or by being forked."""
    generated_tokens: int
    """Tokens sampled and committed."""
    recomputed_tokens: int
    """Part of `computed_tokens` whose KV had been there before."""
    block_copies: int
    """Blocks copied on write."""
    device_block_seconds: float
    host_block_seconds: float
    disk_block_seconds: float
    saved_block_seconds: float
    """What each context would have used alone, less what all used."""


@dataclass(frozen=True, slots=True)
class TierUsage:
    """Block-seconds of one tier since the server started, all tenants; taken = held + unheld."""

    tier: Tier
    taken_block_seconds: float
    held_block_seconds: float
    """Charged to contexts."""
    unheld_block_seconds: float
    """Charged to nobody: prefix cache, and KV of contexts that gave way."""


@dataclass(frozen=True, slots=True)
class QuotaInfo:
    """A tenant's quotas and where it stands; a limit of None is none."""

    blocks: int
    """Device blocks held now, pinned ones too; a shared block counts once."""
    max_blocks: int | None
    block_seconds: float
    """Device block-seconds used in the window; counted only where there is a limit."""
    max_block_seconds: float | None
    window: float
    """Seconds over which block-seconds count; the window slides."""
    contexts: int
    """Contexts held now."""
    max_contexts: int
    max_depth: int
    """Most forks between a context and its root."""
    max_fan_out: int | None
    """Most living children of one context."""


@dataclass(frozen=True, slots=True)
class UsageInfo:
    """Answer of GetUsage, as of one moment."""

    bill: Bill
    num_contexts: int
    """Living contexts it covers."""
    quotas: QuotaInfo
    """The caller's own."""
    tiers: tuple[TierUsage, ...]
