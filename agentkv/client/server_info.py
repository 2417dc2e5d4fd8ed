"""What a server says about itself: frozen values, named as on the wire."""

from dataclasses import dataclass

from agentkv.client.values import PoolInfo


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What a client may want to know of the model."""

    name: str
    architecture: str
    vocab_size: int
    """Width of the logits: every token id is below it."""
    max_length: int
    """Most committed tokens of one context."""
    num_layers: int
    """Attention layers that keep KV."""
    dtype: str
    bytes_per_block: int
    """Bytes one block takes, all layers."""
    has_chat_template: bool
    """Whether create takes messages."""
    adapters: tuple[str, ...] = ()
    """Adapters that create takes."""
    host_bytes_per_block: int = 0
    """Bytes one block takes in host memory or on disk, all layers; 0 without these tiers."""


@dataclass(frozen=True, slots=True)
class LimitsInfo:
    """What one tenant or one call may ask for."""

    max_contexts: int
    """Contexts one tenant may hold."""
    max_fork_count: int
    """Branches of one call."""
    max_depth: int
    """Forks between a context and its root."""
    max_continuations: int
    """Continuations of one score."""
    max_release_count: int
    """Contexts named by one release."""
    max_page_size: int
    max_labels: int
    max_request_bytes: int
    max_deadline: float
    """Seconds one call may take, whatever its deadline."""
    stall_timeout: float
    """Seconds a stream may go unread before it ends with SLOW_READER."""
    default_lease_ttl: float
    """Seconds without use after which a lease expires that names no time."""
    max_lease_ttl: float
    """Most seconds a lease may be asked for."""
    max_pinned_blocks: int
    """Blocks one tenant may pin."""
    handle_retention: float
    """Seconds without use after which a context is released, whatever its lease."""


@dataclass(frozen=True, slots=True)
class DiskCountersInfo:
    """Counts of a server's disk tier since it started, in blocks.

    What fails here loses no token: KV that cannot be written or read back is recomputed.
    """

    num_written: int = 0
    """Written; each takes the model's `host_bytes_per_block`."""
    num_read: int = 0
    """Read back, with the checksum they were written with."""
    num_refused: int = 0
    """Dropped instead of written, because too many were on their way to the disk."""
    num_failed_writes: int = 0
    """Not written because the disk failed, or was full."""
    num_bad_reads: int = 0
    """Missing, torn or of a wrong checksum when they were to be read back."""
    num_timeouts: int = 0
    """Given up because the disk did not answer in time."""
    last_failure: str = ""
    """Why the last failed write failed; empty when none has."""


@dataclass(frozen=True, slots=True)
class CountersInfo:
    """Counts of the server at this moment or since it started."""

    num_contexts: int
    """Contexts of all tenants now."""
    num_running: int
    """Requests that run now."""
    num_waiting: int
    """Requests that wait now."""
    computed_tokens: int
    """Tokens the model ran since start."""
    num_forks: int
    """Contexts made by forking since start."""
    num_block_copies: int
    """Blocks copied on write since start."""
    num_preemptions: int
    """Requests that gave way to others since start."""
    num_moved_out: int = 0
    """Blocks whose KV left the device for the host since start."""
    num_brought_back: int = 0
    """Blocks whose KV came back to the device since start."""
    num_lost: int = 0
    """Blocks whose KV could not be read back and was recomputed since start."""
    disk: DiskCountersInfo | None = None
    """What the disk tier has done; None where there is none."""


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """A server: its model, pool, limits, the options it supports, and counters."""

    server_version: str
    api_versions: tuple[str, ...]
    model: ModelInfo
    pool: PoolInfo
    limits: LimitsInfo
    sampling_options: tuple[str, ...]
    """Sampling options the server supports, by name."""
    counters: CountersInfo
