"""The tiers below the pool at start: how large, in which memory, in which folder."""

from pathlib import Path
from typing import NamedTuple

from agentkv.config import EngineConfig
from agentkv.engine.pool_size import choose_num_disk_blocks, choose_num_host_blocks
from agentkv.errors import InvalidRequest
from agentkv.model.block_format import BlockFormat
from agentkv.model.block_mover import BlockMover
from agentkv.model.device_memory import HostMemory
from agentkv.model.disk_store import HEADER, DiskStore
from agentkv.model.host_store import make_host_store
from agentkv.model.kv_cache import KVCache


class BuiltTiers(NamedTuple):
    """What stands below a pool."""

    host_blocks: int
    disk_blocks: int
    bytes_per_row: int
    """Of one block in a lower tier; 0 without one."""
    mover: BlockMover | None


def build_tiers(kv: KVCache, config: EngineConfig) -> BuiltTiers:
    """Makes the host tier, and the disk tier if a folder is named.

    Raises:
        InvalidRequest: A size holds no block, or the folder cannot be written.
    """
    rounds = config.host_kv_dtype == "int8"
    num_bytes = BlockFormat(kv, rounds=rounds).num_bytes
    free = HostMemory().free()
    host_blocks = choose_num_host_blocks(config, kv.num_blocks, num_bytes, free)
    if host_blocks == 0:
        return BuiltTiers(0, 0, 0, None)
    disk_blocks = choose_num_disk_blocks(config, num_bytes + HEADER.size)
    disk = None
    if config.disk_dir is not None:
        try:
            disk = DiskStore(Path(config.disk_dir))
        except OSError as error:
            raise InvalidRequest(
                f"The folder {config.disk_dir} cannot be used for KV: {error.strerror}."
            ) from error
    host = make_host_store(kv, host_blocks, rounds=rounds)
    return BuiltTiers(host_blocks, disk_blocks, num_bytes, BlockMover(host, disk))
