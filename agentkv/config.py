"""What an operator decides before start: frozen values, each checked once.

What a device or a model decides (dtype sizes, free memory) is an argument elsewhere, never an
edit of these.
"""

import ipaddress
import math
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace

from agentkv.errors import InvalidRequest


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise InvalidRequest(message)


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
        _require(self.host_blocks >= 0, "host_blocks must not be negative.")
        _require(
            self.disk_blocks == 0 or (self.disk_blocks > 0 and self.host_blocks > 0),
            "disk_blocks must not be negative, and a disk tier needs a host tier above it.",
        )
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
    num_speculative_tokens: int = 0
    """Most tokens of a draft, for requests that do not say; 0 drafts for those alone that do."""
    fixed_rows: float = 12.0
    """What a step costs before its first row, in rows, as `benchmarks/step_cost.py` measures it:
    a draft is made where it is worth its rows."""

    def __post_init__(self) -> None:
        for name in ("token_budget", "chunk_size", "max_running", "max_waiting"):
            _require(getattr(self, name) >= 1, f"{name} must be at least 1.")
        _require(self.watermark >= 0, "watermark must not be negative.")
        _require(self.num_speculative_tokens >= 0, "num_speculative_tokens must not be negative.")
        _require(0 <= self.fixed_rows < math.inf, "fixed_rows must be finite and not negative.")


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


@dataclass(frozen=True, slots=True, kw_only=True)
class QuotaConfig:
    """What one tenant may hold and use; None sets no limit beyond the server's own."""

    blocks: int | None = None
    """Device blocks its contexts hold at once, pinned ones too; a shared block counts once."""
    block_seconds: float | None = None
    """Device block-seconds its contexts use in any `window`."""
    window: float = 3600.0
    """Seconds over which block-seconds count."""
    contexts: int | None = None
    """Contexts it may hold."""
    depth: int | None = None
    """Forks between a context and the root it descends from."""
    fan_out: int | None = None
    """Living children of one context."""

    def __post_init__(self) -> None:
        for name in ("blocks", "block_seconds", "window", "contexts", "depth", "fan_out"):
            value = getattr(self, name)
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            _require(
                value is None or (is_number and 0 <= value < math.inf),
                f"the quota {name} must be a number, not negative, got {value!r}.",
            )
            _require(
                value is None or isinstance(value, int) or name in ("block_seconds", "window"),
                f"the quota {name} must be a whole number, got {value!r}.",
            )
        _require(self.window > 0, f"the window of a quota must be above 0, got {self.window}.")


@dataclass(frozen=True, slots=True, kw_only=True)
class QuotasConfig:
    """The quotas of all tenants."""

    default: QuotaConfig = field(default_factory=QuotaConfig)
    """Of a tenant that has none of its own."""
    tenants: Mapping[str, QuotaConfig] = field(default_factory=dict)

    def of(self, tenant: str) -> QuotaConfig:
        """Finds a tenant's quota."""
        return self.tenants.get(tenant, self.default)

    @classmethod
    def read(cls, text: str) -> "QuotasConfig":
        """Reads quotas from TOML: a table `default`, and `tenants.NAME` with what differs from it.

        Raises:
            InvalidRequest: It is no TOML, or holds a key or a value that no quota has.
        """
        try:
            tables = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise InvalidRequest(f"The quotas are no TOML: {error}.") from None
        unknown = tables.keys() - {"default", "tenants"}
        _require(not unknown, f"Quotas know no table {', '.join(sorted(unknown))}.")
        default = _quota("default", tables.get("default", {}), QuotaConfig())
        tenants = tables.get("tenants", {})
        _require(isinstance(tenants, dict), "tenants must be a table of tables.")
        named = {name: _quota(name, table, default) for name, table in tenants.items()}
        return cls(default=default, tenants=named)


def _quota(name: str, table: object, base: QuotaConfig) -> QuotaConfig:
    if not isinstance(table, dict):
        raise InvalidRequest(f"The quotas of {name} must be a table.")
    unknown = table.keys() - {item.name for item in fields(QuotaConfig)}
    _require(not unknown, f"The quotas of {name} know no {', '.join(sorted(unknown))}.")
    try:
        return replace(base, **table)
    except InvalidRequest as error:
        raise InvalidRequest(f"The quotas of {name}: {error.message}") from None


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
            _require(0 < value < float("inf"), f"{name} must be finite and above 0, got {value}.")
        _require(
            self.default_ttl <= self.max_ttl,
            f"default_ttl {self.default_ttl:g} must not be above max_ttl {self.max_ttl:g}.",
        )
        _require(0 <= self.pin_quota <= 1, f"pin_quota must be in [0, 1], got {self.pin_quota}.")
        _require(self.warning >= 0, f"warning must not be negative, got {self.warning}.")

    def max_pinned(self, num_blocks: int) -> int:
        """Says how many blocks of a pool one tenant may pin."""
        return int(self.pin_quota * num_blocks)


@dataclass(frozen=True, slots=True, kw_only=True)
class PressureConfig:
    """When the pool counts as full."""

    soft: float = 0.75
    """Share of the blocks held by contexts from which pressure is SOFT, in (0, 1]."""
    hard: float = 0.9
    """Share of the blocks held by running requests and pins from which it is HARD, in (0, 1]."""
    hysteresis: float = 0.05
    """How far a share must fall below its threshold before the level does, in [0, 1)."""

    def __post_init__(self) -> None:
        for name in ("soft", "hard"):
            value = getattr(self, name)
            _require(0 < value <= 1, f"{name} must be in (0, 1], got {value}.")
        _require(
            0 <= self.hysteresis < min(self.soft, self.hard),
            f"hysteresis must be in [0, min(soft, hard)), got {self.hysteresis}.",
        )


ADAPTER_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """A LoRA adapter that contexts may be created with."""

    name: str
    """As clients name it: 1 to 64 letters, digits, dots, hyphens and underscores."""
    path: str
    """Folder as PEFT saves it."""

    def __post_init__(self) -> None:
        _require(
            ADAPTER_NAME.fullmatch(self.name) is not None,
            f"an adapter's name has 1 to 64 letters, digits, '.', '-' and '_'; got {self.name!r}.",
        )


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
            _require(getattr(self, name) >= 1, f"{name} of snapshots must be at least 1.")


KV_DTYPE_NAMES = ("auto", "int8", "fp8")
HOST_KV_DTYPE_NAMES = ("auto", "int8")
WEIGHT_NAMES = ("auto", "fp32", "bf16", "int8")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Which model an engine serves, and with what means."""

    model: str = "smollm2"
    """An alias, a folder of safetensors, a `.gguf` file, or `owner/name` on the Hub."""
    dtype: str = "auto"
    """`float32`, `bfloat16`, `float16`, or `auto`: float32 on a CPU, else the model's own."""
    device: str = "cpu"
    """A torch device."""
    weights: str = "auto"
    """What weights are kept as, on a CPU: `fp32` as loaded, `bf16`, `int8` with a factor for 64 of
    them; `auto` is int8 where native kernels were compiled and the model is large enough."""
    block_size: int = 16
    """Token positions per block, at least 1."""
    num_blocks: int | None = None
    """Blocks of the pool; None takes as many as `kv_memory` holds."""
    kv_memory: int | None = None
    """Bytes of the pool; None takes, on a CPU, a fifth of the memory that is free, at most 4 GiB,
    and on a GPU what `memory_utilization` leaves."""
    memory_utilization: float | None = None
    """Share of a GPU's memory, in (0, 1], that weights, the largest step and the pool take
    together; None is 0.9."""
    kv_dtype: str = "auto"
    """What KV is stored as: `auto` is what the model computes; `int8` and `fp8` hold about twice
    the tokens of 16 bits, rounded to within a few percent of the logits' range. On a CPU prefer
    `int8`: there is no native kernel for `fp8`."""
    host_blocks: int | None = None
    """Blocks of the host tier, where KV goes that leaves the pool; 0: it is dropped instead, and
    recomputed. None takes as many as the pool has, if a fifth of the free memory holds them."""
    host_memory: int | None = None
    """Bytes of the host tier, in place of `host_blocks`."""
    host_kv_dtype: str = "auto"
    """What KV is kept as on the host and on disk: `auto` is exact; `int8` takes about a quarter of
    float32, rounded; on a CPU only."""
    disk_dir: str | None = None
    """Folder of the disk tier, below the host's; None: there is none."""
    disk_bytes: int | None = None
    """Most bytes of files there; None is 4 GiB."""
    graphs: bool | None = None
    """Whether steps of decoding run as CUDA graphs; None: on a GPU."""
    fuse_weights: bool | None = None
    """Whether projections of one input are one matrix product; None: on a GPU, where it saves
    launches. On a CPU no difference could be measured, at 1 to 64 rows."""
    compile: bool = False
    """Whether the model is compiled by torch.compile."""
    adapters: tuple[AdapterConfig, ...] = ()
    """LoRA adapters beside the model's weights, of different names."""
    batch_invariant: bool = False
    """Whether a branch's logits do not depend on what runs beside it, to the bit; on a GPU only,
    and slower: every step is padded to the token budget."""
    max_length: int | None = None
    """Most committed tokens of one context; None takes the model's own limit."""
    num_threads: int | None = None
    """Threads the model computes with; None leaves the choice to torch: one per core."""
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    limits: LimitsConfig = field(default_factory=LimitsConfig)
    leases: LeaseConfig = field(default_factory=LeaseConfig)
    pressure: PressureConfig = field(default_factory=PressureConfig)
    quotas: QuotasConfig = field(default_factory=QuotasConfig)
    snapshots: SnapshotConfig = field(default_factory=SnapshotConfig)

    def __post_init__(self) -> None:
        for name in ("block_size", "num_blocks", "kv_memory", "max_length", "num_threads"):
            value = getattr(self, name)
            _require(value is None or value >= 1, f"{name} must be at least 1, got {value}.")
        _require(
            self.num_blocks is None or self.kv_memory is None,
            "num_blocks and kv_memory both size the pool; set one of them.",
        )
        utilization = self.memory_utilization
        _require(
            utilization is None or 0 < utilization <= 1,
            f"memory_utilization must be in (0, 1], got {utilization}.",
        )
        _require(
            utilization is None or (self.num_blocks is None and self.kv_memory is None),
            "memory_utilization sizes the pool, as num_blocks and kv_memory do; set one of them.",
        )
        _require(
            self.kv_dtype in KV_DTYPE_NAMES,
            f"kv_dtype must be {', '.join(KV_DTYPE_NAMES)}; got {self.kv_dtype!r}.",
        )
        _require(
            self.weights in WEIGHT_NAMES,
            f"weights must be {', '.join(WEIGHT_NAMES)}; got {self.weights!r}.",
        )
        _require(
            not self.compile or self.weights in ("auto", "fp32"),
            f"compile compiles torch's operations alone; leave out weights {self.weights}.",
        )
        names = [adapter.name for adapter in self.adapters]
        _require(len(set(names)) == len(names), f"two adapters have one name: {sorted(names)}.")
        _require(
            not self.adapters or not (self.compile or self.batch_invariant),
            "adapters cannot be served with compile or batch_invariant: which rows have one, and "
            "how many, changes from step to step.",
        )
        self._check_tiers()
        if not self.is_on_gpu:
            self._refuse_on_cpu()

    @property
    def is_on_gpu(self) -> bool:
        """Whether the device is a CUDA one."""
        return self.device.partition(":")[0] == "cuda"

    def _check_tiers(self) -> None:
        """Refuses tiers below the pool that cannot be.

        Raises:
            InvalidRequest: Names the option and why.
        """
        _require(
            self.host_blocks is None or self.host_blocks >= 0, "host_blocks must not be negative."
        )
        for name in ("host_memory", "disk_bytes"):
            value = getattr(self, name)
            _require(value is None or value >= 1, f"{name} must be at least 1, got {value}.")
        _require(
            self.host_blocks is None or self.host_memory is None,
            "host_blocks and host_memory both size the host tier; set one of them.",
        )
        _require(
            self.host_kv_dtype in HOST_KV_DTYPE_NAMES,
            f"host_kv_dtype must be {', '.join(HOST_KV_DTYPE_NAMES)}; got {self.host_kv_dtype!r}.",
        )
        _require(
            self.host_kv_dtype == "auto" or not self.is_on_gpu,
            "host_kv_dtype is for the device cpu: a GPU's blocks are kept as they are; use "
            "kv_dtype.",
        )
        _require(
            self.disk_bytes is None or self.disk_dir is not None,
            "disk_bytes bounds a disk tier; set disk_dir as well.",
        )
        _require(
            self.disk_dir is None or self.host_blocks != 0,
            "A disk tier needs a host tier above it: host_blocks must not be 0.",
        )

    def _refuse_on_cpu(self) -> None:
        """Refuses what only a GPU can do.

        Raises:
            InvalidRequest: Names the option and why.
        """
        _require(not self.graphs, "graphs are CUDA graphs; they need the device cuda.")
        _require(
            self.memory_utilization is None,
            "memory_utilization is for the device cuda; use kv_memory on a CPU.",
        )
        _require(
            not self.batch_invariant,
            "batch_invariant needs the device cuda: on a CPU the order of sums depends on who "
            "shares a prefix and on how many rows are multiplied, so that branches are equal to "
            "rounding, not to the bit.",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Where the server listens, and what it grants one connection or call."""

    host: str = "127.0.0.1"
    """Address to listen on, a name or a number."""
    port: int = 50051
    """Port to listen on, in [0, 65536); 0 takes a free one, which the server reports."""
    insecure: bool = False
    """Whether an address beyond this host may be served without credentials."""
    max_message_bytes: int = 16 << 20
    """Bytes of one request; more is refused before it is read."""
    max_concurrent_rpcs: int = 1024
    """Calls that may be open at once: an outer fuse, admission is the engine's."""
    stall_timeout: float = 30.0
    """Seconds a stream may go unread before it ends with SLOW_READER."""
    default_deadline: float = 600.0
    """Seconds granted to a call that names no deadline."""
    max_deadline: float = 3600.0
    """Seconds granted to any call, whatever deadline it names."""
    grace: float = 10.0
    """Seconds that open calls may run on when the server is told to stop."""

    def __post_init__(self) -> None:
        _require(0 <= self.port < 65536, f"port must be in [0, 65536), got {self.port}.")
        _require(
            1 <= self.max_message_bytes < 2**31,
            f"max_message_bytes must be in [1, 2**31), got {self.max_message_bytes}.",
        )
        _require(self.max_concurrent_rpcs >= 1, "max_concurrent_rpcs must be at least 1.")
        for name in ("stall_timeout", "default_deadline", "max_deadline"):
            _require(getattr(self, name) > 0, f"{name} must be above 0.")
        _require(self.grace >= 0, f"grace must not be negative, got {self.grace}.")
        _require(
            self.default_deadline <= self.max_deadline,
            "default_deadline must not be above max_deadline.",
        )
        _require(
            self.is_loopback or self.insecure,
            f"{self.host} is reachable from other hosts, and calls carry no credentials; "
            "set insecure to serve it nevertheless.",
        )

    @property
    def is_loopback(self) -> bool:
        """Whether only this host can reach the address."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:  # a name, which may mean anything but for this one
            return self.host == "localhost"
