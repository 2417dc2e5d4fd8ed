"""`agentkv info`: what a running server says about itself."""

from rich.console import Console

from agentkv.cli.connection import AddressArgument, connected
from agentkv.cli.sizes import format_bytes
from agentkv.cli.tables import facts_table
from agentkv.client.client import DEFAULT_ADDRESS
from agentkv.client.server_info import CountersInfo, ModelInfo, ServerInfo
from agentkv.client.values import PoolInfo


def info(address: AddressArgument = DEFAULT_ADDRESS) -> None:
    """Show the model, the pool, the limits and the counters of a running server."""
    with connected(address) as client:
        Console().print(facts_table(describe(address, client.server_info())))


def describe(address: str, info: ServerInfo) -> dict[str, str]:
    """Writes a server's facts for people."""
    model, pool, counters, limits = info.model, info.pool, info.counters, info.limits
    return {
        "Server": f"{address}, version {info.server_version}, {', '.join(info.api_versions)}",
        "Model": f"{model.name} ({model.architecture}, {model.dtype}, {model.num_layers} layers)",
        **({"Adapters": ", ".join(model.adapters)} if model.adapters else {}),
        "Contexts": f"{counters.num_contexts} now, at most {model.max_length:,} tokens each",
        "Requests": f"{counters.num_running} running, {counters.num_waiting} waiting",
        "Pool": (
            f"{pool.total_blocks:,} blocks of {pool.block_size} tokens, "
            f"{format_bytes(model.bytes_per_block)} each: {pool.live_blocks:,} live, "
            f"{pool.cached_blocks:,} cached, {pool.free_blocks:,} free"
        ),
        "Pressure": (
            f"{pool.level}, {pool.reclaimable_blocks:,} blocks reclaimable, "
            f"{pool.pinned_blocks:,} pinned"
        ),
        "Parked": (
            f"{pool.host_live_blocks:,} of {pool.host_total_blocks:,} blocks in host memory, "
            f"{pool.disk_live_blocks:,} of {pool.disk_total_blocks:,} on disk"
        ),
        "Since start": (
            f"{counters.computed_tokens:,} tokens computed, {counters.num_forks:,} forks, "
            f"{counters.num_block_copies:,} block copies, {counters.num_preemptions:,} preemptions"
        ),
        **_describe_moves(model, pool, counters),
        "Limits": (
            f"{limits.max_contexts:,} contexts, {limits.max_fork_count:,} branches a fork, "
            f"{limits.max_continuations:,} continuations a score, "
            f"{limits.max_deadline:g} s a call"
        ),
        "Leases": (
            f"{limits.default_lease_ttl:g} s by default, at most {limits.max_lease_ttl:g} s; "
            f"{limits.max_pinned_blocks:,} blocks pinned a tenant; released after "
            f"{limits.handle_retention:g} s without use"
        ),
        "Sampling": ", ".join(info.sampling_options),
    }


def _describe_moves(model: ModelInfo, pool: PoolInfo, counters: CountersInfo) -> dict[str, str]:
    """Writes what the tiers below the pool have done since start, if there are any."""
    facts, disk = {}, counters.disk
    if pool.host_total_blocks:
        facts["Moved"] = (
            f"{counters.num_moved_out:,} blocks out to host memory, "
            f"{counters.num_brought_back:,} brought back, {counters.num_lost:,} lost"
        )
    if disk is not None:
        size = model.host_bytes_per_block
        why = f" ({disk.last_failure})" if disk.last_failure else ""
        facts["Disk"] = (
            f"{disk.num_written:,} blocks written ({format_bytes(disk.num_written * size)}), "
            f"{disk.num_read:,} read back ({format_bytes(disk.num_read * size)}); "
            f"{disk.num_refused:,} refused, {disk.num_failed_writes:,} failed writes{why}, "
            f"{disk.num_bad_reads:,} bad reads, {disk.num_timeouts:,} timeouts"
        )
    return facts
