"""What decides the speed of a workload: tiles, split length, sharing, 8-bit KV; and other kernels.

Each function measures one question and returns lines of the report.
"""

from collections.abc import Iterator
from functools import partial

import torch

from agentkv_kernels import (
    AttentionPlan,
    KVRun,
    KVScales,
    WorkBuffers,
    allocate_kv,
    store_kv,
    work_options,
)
from agentkv_kernels._triton.attention import attend
from agentkv_kernels._triton.copy_blocks import launch_copies
from agentkv_kernels._triton.merge import merge
from agentkv_kernels._triton.tile_config import TileConfig
from agentkv_kernels._triton.tree_attention import Partials, Score, Tiles, tiles_for
from benchmarks.gpu.contestants import Scene, options_of, ours
from benchmarks.gpu.timing import Timer
from benchmarks.gpu.workloads import BLOCK_SIZE
from benchmarks.report import Result

SMALL_TILES = (
    TileConfig(16, 32, 4, 3),
    TileConfig(16, 64, 4, 2),
    TileConfig(16, 64, 4, 4),
    TileConfig(16, 128, 4, 2),
)
LARGE_TILES = (
    TileConfig(64, 32, 4, 2),
    TileConfig(64, 32, 4, 4),
    TileConfig(64, 64, 4, 2),
    TileConfig(64, 64, 8, 3),
)


def sweep_splits(scene: Scene, timer: Timer, *, tiny: bool) -> Iterator[Result]:
    """Measures lengths of pieces, and batch-invariant mode."""
    name = scene.workload.name
    for split in (64,) if tiny else (256, 512, 1024, 2048, 4096):
        times = timer.microseconds(ours(scene, options_of(scene, split_tokens=split)), 20)
        yield Result.of(name, f"tree, pieces of {split}", "one layer", "us", times)
    times = timer.microseconds(ours(scene, options_of(scene, batch_invariant=True)), 20)
    yield Result.of(name, "tree, batch-invariant", "one layer", "us", times)


def sweep_tiles(scene: Scene, timer: Timer, *, tiny: bool) -> Iterator[Result]:
    """Measures tiles other than the table's."""
    default = tiles_for(scene.query, scene.sets[0, 0], scene.sets[0, 1])
    variants = [Tiles(small, default.large) for small in SMALL_TILES]
    variants += [Tiles(default.small, large) for large in LARGE_TILES]
    for tiles in variants[:1] if tiny else variants:
        changed = tiles.small if tiles.small != default.small else tiles.large
        times = timer.microseconds(ours(scene, options_of(scene), tiles), 20)
        label = f"{changed.block_m}x{changed.block_n}, {changed.num_stages} stages, " + (
            f"{changed.num_warps} warps"
        )
        yield Result.of(scene.workload.name, f"tree, tile {label}", "one layer", "us", times)


def eight_bits(scene: Scene, timer: Timer, *, tiny: bool) -> Iterator[Result]:
    """Measures the same tree on 8-bit KV."""
    kv, device = scene.sets, scene.query.device
    options = options_of(scene, kv_item_bytes=1)
    buffers = WorkBuffers.of(scene.layout.plan, options, device)
    score = Score(scene.scale, None, None)
    slots = torch.arange(kv.shape[2] * BLOCK_SIZE, device=device)
    for dtype in (torch.int8,) if tiny else (torch.int8, torch.float8_e4m3fn):
        small = torch.zeros(kv.shape, dtype=dtype, device=device)
        factors = torch.zeros(kv.shape[:5], device=device)
        calls = []
        for wide, narrow, factor in zip(kv, small, factors, strict=True):
            scales = KVScales(factor[0], factor[1])
            key, value = wide[0].flatten(0, 1), wide[1].flatten(0, 1)
            store_kv(
                key, value, narrow[0], narrow[1], slots, scales=scales, implementation="triton"
            )
            calls.append(partial(attend, scene.query, narrow[0], narrow[1], buffers, score, scales))
        label = f"tree, {str(dtype).removeprefix('torch.')} KV"
        times = timer.microseconds(calls, 20)
        yield Result.of(scene.workload.name, label, "one layer", "us", times)


def fixed_cost(device: torch.device, timer: Timer) -> Result:
    """Measures attention and merge of one row with next to no KV: what every layer pays."""
    kv = allocate_kv(1, 64, BLOCK_SIZE, 8, 128, dtype=torch.bfloat16, device=device)
    query = torch.zeros((2, 32, 128), dtype=torch.bfloat16, device=device)
    runs = [KVRun(0, 16, [0], range(2)), KVRun(16, 32, [1], [0]), KVRun(16, 32, [2], [1])]
    plan = AttentionPlan.build(runs, [32, 32], block_size=BLOCK_SIZE)
    options = work_options(query, kv[0, 0], kv[0, 1])._replace(sharing="all")
    buffers = WorkBuffers.of(plan, options, device)
    score = Score(0.1, None, None)
    call = partial(attend, query, kv[0, 0], kv[0, 1], buffers, score)
    times = timer.microseconds([call] * 16)
    return Result.of("fixed", "tree", "attention + merge, one layer", "us", times)


def other_kernels(scene: Scene, timer: Timer) -> Iterator[Result]:
    """Measures storing a step's KV, copying blocks over all sets, and the merge alone."""
    kv, rows = scene.sets[0], min(scene.workload.num_rows, scene.sets.shape[2])
    heads, device = scene.workload.heads, scene.query.device
    name = scene.workload.name
    new = torch.randn((rows, heads.kv, heads.dim), device=device).to(torch.bfloat16)
    slots = torch.arange(rows, device=device)
    store = partial(
        store_kv, new, new, kv[0], kv[1], slots, check_slots=False, implementation="triton"
    )
    times = timer.microseconds([store] * 8)
    yield Result.of(name, "store_kv", f"{rows} rows", "us", times)
    pairs = min(16, kv.shape[1] // 2)
    table = torch.zeros((17, 4), dtype=torch.int32)
    table[0, 0] = pairs
    for pair in range(pairs):
        table[1 + pair] = torch.tensor([pair, pairs + pair, 9, 0])
    times = timer.microseconds([partial(launch_copies, scene.sets, table.to(device))] * 8)
    label = f"{pairs} pairs, {len(scene.sets)} layers"
    yield Result.of(name, "copy_blocks", label, "us", times)
    buffers = WorkBuffers.of(scene.layout.plan, options_of(scene), device)
    partials = Partials.empty(buffers.buckets.partials, heads.query, heads.dim, device)
    partials.out.zero_()
    partials.lse.zero_()
    times = timer.microseconds(
        [partial(merge, buffers, partials, None, torch.empty_like(scene.query))] * 8
    )
    yield Result.of(name, "merge", f"{buffers.work.num_partials} partials", "us", times)


def extend(scene: Scene, timer: Timer, branches: int, new: int) -> Result:
    """Measures new tokens of several branches below the scene's first segment, in one step."""
    plan, heads = scene.layout.plan, scene.workload.heads
    prefix = plan.ends[0]
    needed = new // BLOCK_SIZE
    spare = [int(block) for ids in plan.blocks[1:] for block in ids][: branches * needed]
    branches = min(branches, len(spare) // needed)
    runs = [KVRun(0, prefix, plan.blocks[0].tolist(), range(branches * new))]
    for branch in range(branches):
        rows = range(branch * new, (branch + 1) * new)
        blocks = spare[branch * needed : (branch + 1) * needed]
        runs.append(KVRun(prefix, prefix + new, blocks, rows))
    kv_lens = [prefix + 1 + token for _ in range(branches) for token in range(new)]
    extending = AttentionPlan.build(runs, kv_lens, block_size=BLOCK_SIZE)
    shape = (branches * new, heads.query, heads.dim)
    query = torch.randn(shape, device=scene.query.device).to(torch.bfloat16)
    longer = scene._replace(query=query, layout=scene.layout._replace(plan=extending))
    times = timer.microseconds(ours(longer, options_of(longer)), 10)
    label = f"extend {branches} x {new} tokens"
    return Result.of(scene.workload.name, "tree", label, "us", times)
