"""What an operator decides before start: frozen values, each checked once, a file for each.

What a device or a model decides (dtype sizes, free memory) is an argument elsewhere, never an
edit of these.
"""

from agentkv.config.adapters import AdapterConfig
from agentkv.config.engine import WEIGHT_NAMES, EngineConfig
from agentkv.config.leases import LeaseConfig
from agentkv.config.limits import LimitsConfig
from agentkv.config.pool import PoolConfig
from agentkv.config.pressure import PressureConfig
from agentkv.config.quotas import QuotaConfig, QuotasConfig
from agentkv.config.scheduler import SchedulerConfig
from agentkv.config.server import ServerConfig
from agentkv.config.snapshots import SnapshotConfig

__all__ = [
    "WEIGHT_NAMES",
    "AdapterConfig",
    "EngineConfig",
    "LeaseConfig",
    "LimitsConfig",
    "PoolConfig",
    "PressureConfig",
    "QuotaConfig",
    "QuotasConfig",
    "SchedulerConfig",
    "ServerConfig",
    "SnapshotConfig",
]
