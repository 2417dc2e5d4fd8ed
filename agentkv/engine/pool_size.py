"""How many blocks the pool gets: what was asked for, if it fits, else what memory allows.

    GPU    share of the device - weights and whatever else is held - the largest step - graphs
    CPU    a fifth of the memory that is free, at most 4 GiB
    host   as many blocks as the pool, at most a fifth of the memory that is free

Numbers only: who measures them is passed in.
"""

from typing import NamedTuple

from agentkv.config import EngineConfig
from agentkv.errors import InvalidRequest

DEFAULT_POOL_SHARE = 5
"""On a CPU the pool takes one part in so many of the memory that is free."""
DEFAULT_POOL_LIMIT = 4 << 30
DEFAULT_DISK_BYTES = 4 << 30
DEFAULT_UTILIZATION = 0.9
"""On a GPU, share of its memory that weights, steps and the pool take together."""


class MemoryFacts(NamedTuple):
    """Bytes of a device, once the model is loaded."""

    total: int
    """All there is."""
    free: int
    """What nobody holds."""
    step: int
    """What must stay free for steps and graphs; 0 where that is not measured."""


def choose_num_blocks(
    config: EngineConfig, bytes_per_block: int, memory: MemoryFacts, *, on_gpu: bool
) -> int:
    """Chooses the size of the pool.

    Args:
        config: What was asked for.
        bytes_per_block: Of K and V, all layers.
        memory: Of the device.
        on_gpu: Whether memory ends where the device's does.

    Raises:
        InvalidRequest: The pool does not fit, or no block does; says what takes the memory.
    """
    if config.num_blocks is not None:
        if on_gpu:
            _check_fits(config.num_blocks * bytes_per_block, memory)
        return config.num_blocks
    if config.kv_memory is not None:
        if on_gpu:
            _check_fits(config.kv_memory, memory)
        num_blocks = config.kv_memory // bytes_per_block
    elif on_gpu:
        return _fill(config, bytes_per_block, memory)
    else:
        share = min(memory.free // DEFAULT_POOL_SHARE, DEFAULT_POOL_LIMIT)
        num_blocks = share // bytes_per_block
    if num_blocks < 1:
        raise InvalidRequest(
            f"The pool's memory does not hold one block of {bytes_per_block} bytes; give it more."
        )
    return num_blocks


def choose_num_host_blocks(
    config: EngineConfig, num_blocks: int, bytes_per_row: int, free: int
) -> int:
    """Chooses the size of the host tier: that of the pool, unless memory is short.

    All that can be on the device can then be parked, which is what one large tool call of every
    agent needs; more would be used by prefix cache alone.

    Args:
        config: What was asked for.
        num_blocks: Of the pool.
        bytes_per_row: Of one block on the host.
        free: Bytes of the computer's memory that nobody holds.

    Raises:
        InvalidRequest: The memory asked for does not hold one block.
    """
    if config.host_blocks is not None:
        return config.host_blocks
    if config.host_memory is not None:
        if config.host_memory < bytes_per_row:
            raise InvalidRequest(
                f"The host tier's memory does not hold one block of {bytes_per_row} bytes; give it "
                "more, or set host_blocks to 0."
            )
        return config.host_memory // bytes_per_row
    return min(num_blocks, free // DEFAULT_POOL_SHARE // bytes_per_row)


def choose_num_disk_blocks(config: EngineConfig, bytes_per_file: int) -> int:
    """Chooses how many blocks the disk tier has; 0 without a folder.

    Raises:
        InvalidRequest: Not one block may be written.
    """
    if config.disk_dir is None:
        return 0
    num_blocks = (config.disk_bytes or DEFAULT_DISK_BYTES) // bytes_per_file
    if num_blocks < 1:
        raise InvalidRequest(
            f"disk_bytes does not hold one block of {bytes_per_file} bytes; give it more."
        )
    return num_blocks


def _fill(config: EngineConfig, bytes_per_block: int, memory: MemoryFacts) -> int:
    """Takes all of the device's share that nothing else needs."""
    utilization = config.memory_utilization or DEFAULT_UTILIZATION
    share = int(memory.total * utilization)
    held = memory.total - memory.free
    num_blocks = (share - held - memory.step) // bytes_per_block
    if num_blocks < 1:
        raise InvalidRequest(
            f"No block of KV fits: {utilization:g} of the device are {_gib(share)}, of which "
            f"{_gib(held)} are held already (weights, and other processes if any) and "
            f"{_gib(memory.step)} are needed by a step of {config.scheduler.token_budget} tokens. "
            "Raise the memory utilization, lower the token budget, or load a smaller model."
        )
    return num_blocks


def _check_fits(pool: int, memory: MemoryFacts) -> None:
    available = memory.free - memory.step
    if pool > available:
        raise InvalidRequest(
            f"A pool of {_gib(pool)} does not fit: {_gib(memory.free)} of {_gib(memory.total)} are "
            f"free, and steps need {_gib(memory.step)} of them. At most {_gib(max(0, available))} "
            "are left for KV."
        )


def _gib(count: int) -> str:
    return f"{count / 2**30:.2f} GiB"
