"""What `agentkv serve` says of the engine once it serves. It knows values alone."""

import resource
from pathlib import Path
from typing import TYPE_CHECKING

from agentkv.cli.sizes import format_bytes

if TYPE_CHECKING:
    from agentkv.engine.outputs import EngineView


def summarise(view: "EngineView", address: str) -> dict[str, str]:
    """Writes what was loaded for people."""
    model, pool = view.model, view.pool
    size = pool.total * model.bytes_per_block
    return {
        "Model": f"{model.name} ({model.architecture}, {model.dtype})",
        "Weights": f"{model.weights}, {format_bytes(model.weight_bytes)}",
        **({"Adapters": ", ".join(model.adapters)} if model.adapters else {}),
        "Pool": (
            f"{pool.total:,} blocks of {pool.block_size} tokens, "
            f"{format_bytes(model.bytes_per_block)} each, {format_bytes(size)} in all"
        ),
        "Fits": (
            f"{pool.total * pool.block_size:,} distinct tokens of KV, in contexts of at most "
            f"{model.max_length:,}"
        ),
        "Parked": _describe_tiers(view),
        "Memory": f"{format_bytes(resident_bytes())} resident",
        "Address": address,
    }


def _describe_tiers(view: "EngineView") -> str:
    """Says where KV goes that leaves the pool."""
    size, host, disk = view.model.host_bytes_per_block, view.pool.host, view.pool.disk
    if not host.total:
        return "nowhere: KV that gives way is recomputed"
    text = f"{host.total:,} blocks in host memory, {format_bytes(host.total * size)}"
    if disk.total:
        text += f", then {disk.total:,} on disk, {format_bytes(disk.total * size)}"
    return text


def resident_bytes() -> int:
    """Bytes of this process that are in memory now; where only a peak is known, that."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # bytes on macOS
    return pages * resource.getpagesize()
