"""Who attends: our tree plan, our flat plan, torch's SDPA, and FlashInfer where it is installed.

Each contestant turns a workload into calls, one for each set of KV. Peers are measured, never
needed: one that is absent or fails is reported and left out.
"""

import importlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from agentkv_kernels import WorkBuffers, WorkOptions, allocate_kv, work_options
from agentkv_kernels._triton.attention import attend
from agentkv_kernels._triton.tree_attention import Score, Tiles
from benchmarks.gpu.timing import Call
from benchmarks.gpu.workloads import BLOCK_SIZE, Layout, Workload

MAX_DENSE_BYTES = 24e9
"""Most bytes of KV that SDPA gets a copy of: it cannot share."""
CACHE_BYTES = 60e6
"""L2 of an H200."""


class Scene(NamedTuple):
    """One workload's tensors."""

    workload: Workload
    layout: Layout
    query: Tensor
    sets: Tensor
    """(num_sets, 2, num_blocks, block_size, num_kv_heads, head_dim): equal KV, different memory."""

    @property
    def scale(self) -> float:
        """Of the scores."""
        return float(self.workload.heads.dim**-0.5)


def stage(workload: Workload, layout: Layout, device: torch.device, *, cold: bool) -> Scene:
    """Makes random tensors; enough sets that none is in the cache when its turn comes."""
    heads = workload.heads
    num_sets = max(3, min(24, -(-int(3 * CACHE_BYTES) // workload.tree_bytes))) if cold else 1
    sets = allocate_kv(
        num_sets if device.type == "cuda" else 1,
        layout.num_blocks,
        BLOCK_SIZE,
        heads.kv,
        heads.dim,
        dtype=torch.bfloat16,
        device=device,
    ).normal_()
    query = torch.randn((workload.num_rows, heads.query, heads.dim), device=device)
    return Scene(workload, layout, query.to(torch.bfloat16), sets)


def options_of(scene: Scene, **chosen: Any) -> WorkOptions:
    """The options that serving uses, some of them chosen."""
    first = scene.sets[0]
    return work_options(scene.query, first[0], first[1])._replace(**chosen)


def ours(scene: Scene, options: WorkOptions, tiles: Tiles | None = None) -> list[Call]:
    """Our kernels on a plan cut as `options` say."""
    buffers = WorkBuffers.of(scene.layout.plan, options, scene.query.device)
    score = Score(scene.scale, None, None)

    def call(kv: Tensor) -> Call:
        return lambda: attend(scene.query, kv[0], kv[1], buffers, score, tiles=tiles)

    return [call(kv) for kv in scene.sets]


def dense(scene: Scene) -> list[Call]:
    """Torch's attention on a dense copy of every branch's KV."""
    workload = scene.workload
    if workload.flat_bytes > MAX_DENSE_BYTES:
        raise MemoryError(f"{workload.flat_bytes / 1e9:.0f} GB of dense KV")
    shape = (workload.num_rows, workload.heads.kv, workload.kv_len, workload.heads.dim)
    key, value = (torch.randn(shape, device=scene.query.device, dtype=torch.bfloat16)
                  for _ in range(2))  # fmt: skip
    query = scene.query[:, :, None]  # (num_rows, num_q_heads, 1, head_dim)
    grouped = workload.heads.query != workload.heads.kv
    return [
        lambda: functional.scaled_dot_product_attention(
            query, key, value, scale=scene.scale, enable_gqa=grouped
        )
    ]


def flashinfer(scene: Scene) -> list[Call]:
    """FlashInfer's paged decoding, which reads each branch's blocks for itself."""
    library: Any = importlib.import_module("flashinfer")
    workload, device = scene.workload, scene.query.device
    wrapper = library.BatchDecodeWithPagedKVCacheWrapper(
        torch.empty(256 << 20, dtype=torch.uint8, device=device), "NHD"
    )
    counts = [len(table) for table in scene.layout.tables]
    begins = torch.tensor([0, *counts], dtype=torch.int32).cumsum(0).to(torch.int32)
    ids = torch.tensor([block for table in scene.layout.tables for block in table],
                       dtype=torch.int32)  # fmt: skip
    heads = workload.heads
    wrapper.plan(
        begins.to(device),
        ids.to(device),
        torch.full((workload.num_rows,), BLOCK_SIZE, dtype=torch.int32, device=device),
        heads.query,
        heads.kv,
        heads.dim,
        BLOCK_SIZE,
        q_data_type=torch.bfloat16,
        kv_data_type=torch.bfloat16,
    )

    def call(kv: Tensor) -> Call:
        return lambda: wrapper.run(scene.query, (kv[0], kv[1]))

    return [call(kv) for kv in scene.sets]


PEERS: Sequence[tuple[str, Callable[[Scene], list[Call]]]] = (
    ("torch SDPA", dense),
    ("FlashInfer", flashinfer),
)


def calls_of(name: str, make: Callable[[Scene], list[Call]], scene: Scene) -> list[Call] | None:
    """Prepares a peer, and runs it once; None, with a line that says why, where it cannot run."""
    try:
        calls = make(scene)
        calls[0]()
    except Exception as error:  # whatever it is: a peer must not end the run
        print(f"{scene.workload.name}: no {name}: {type(error).__name__}: {error}")
        return None
    return calls
