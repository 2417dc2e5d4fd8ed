"""Which model an engine serves, and with what means.

It refuses what contradicts itself or the kind of device; what a model or a very device cannot do
is found when it is loaded.
"""

from dataclasses import dataclass, field

from agentkv.config.adapters import AdapterConfig
from agentkv.config.leases import LeaseConfig
from agentkv.config.limits import LimitsConfig
from agentkv.config.pressure import PressureConfig
from agentkv.config.quotas import QuotasConfig
from agentkv.config.requirement import require
from agentkv.config.scheduler import SchedulerConfig
from agentkv.config.snapshots import SnapshotConfig

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
    and slower: every step is padded to the token budget. Native 8-bit weights need no such mode."""
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
            require(value is None or value >= 1, f"{name} must be at least 1, got {value}.")
        require(
            self.num_blocks is None or self.kv_memory is None,
            "num_blocks and kv_memory both size the pool; set one of them.",
        )
        utilization = self.memory_utilization
        require(
            utilization is None or 0 < utilization <= 1,
            f"memory_utilization must be in (0, 1], got {utilization}.",
        )
        require(
            utilization is None or (self.num_blocks is None and self.kv_memory is None),
            "memory_utilization sizes the pool, as num_blocks and kv_memory do; set one of them.",
        )
        require(
            self.kv_dtype in KV_DTYPE_NAMES,
            f"kv_dtype must be {', '.join(KV_DTYPE_NAMES)}; got {self.kv_dtype!r}.",
        )
        require(
            self.weights in WEIGHT_NAMES,
            f"weights must be {', '.join(WEIGHT_NAMES)}; got {self.weights!r}.",
        )
        require(
            not self.compile or self.weights in ("auto", "fp32"),
            f"compile compiles torch's operations alone; leave out weights {self.weights}.",
        )
        names = [adapter.name for adapter in self.adapters]
        require(len(set(names)) == len(names), f"two adapters have one name: {sorted(names)}.")
        require(
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
        require(
            self.host_blocks is None or self.host_blocks >= 0, "host_blocks must not be negative."
        )
        for name in ("host_memory", "disk_bytes"):
            value = getattr(self, name)
            require(value is None or value >= 1, f"{name} must be at least 1, got {value}.")
        require(
            self.host_blocks is None or self.host_memory is None,
            "host_blocks and host_memory both size the host tier; set one of them.",
        )
        require(
            self.host_kv_dtype in HOST_KV_DTYPE_NAMES,
            f"host_kv_dtype must be {', '.join(HOST_KV_DTYPE_NAMES)}; got {self.host_kv_dtype!r}.",
        )
        require(
            self.host_kv_dtype == "auto" or not self.is_on_gpu,
            "host_kv_dtype is for the device cpu: a GPU's blocks are kept as they are; use "
            "kv_dtype.",
        )
        require(
            self.disk_bytes is None or self.disk_dir is not None,
            "disk_bytes bounds a disk tier; set disk_dir as well.",
        )
        require(
            self.disk_dir is None or self.host_blocks != 0,
            "A disk tier needs a host tier above it: host_blocks must not be 0.",
        )

    def _refuse_on_cpu(self) -> None:
        """Refuses what only a GPU can do.

        Raises:
            InvalidRequest: Names the option and why.
        """
        require(not self.graphs, "graphs are CUDA graphs; they need the device cuda.")
        require(
            self.memory_utilization is None,
            "memory_utilization is for the device cuda; use kv_memory on a CPU.",
        )
        require(
            not self.batch_invariant,
            "batch_invariant needs the device cuda: on a CPU native 8-bit weights give the same "
            "bits in any company without it, and with other weights branches are equal to "
            "rounding, not to the bit.",
        )
