"""The trees that attention is measured on, what they must cost, and where their KV lies.

W1 to W9 are named in the report; `predict` says, before anything runs, what physics allows. It
knows no kernel.
"""

import random
from typing import NamedTuple

import numpy as np

from agentkv_kernels import AttentionPlan, KVRun

BLOCK_SIZE = 16
READ_BYTES_PER_US = 4.3e6
"""What an H200 copies, measured elsewhere; its datasheet says 4.8e6."""
FLOP_PER_US = 790e6
FIXED_US = 8.0
"""Two launches in a graph: attention and merge."""


class Heads(NamedTuple):
    """Query heads, KV heads, and their size."""

    query: int
    kv: int
    dim: int


class Level(NamedTuple):
    """Segments side by side; each level's hang evenly below those of the level above."""

    segments: int
    tokens: int


class Workload(NamedTuple):
    """A tree; its last level's segments are the branches, one row each."""

    name: str
    levels: tuple[Level, ...]
    heads: Heads = Heads(32, 8, 128)

    @property
    def num_rows(self) -> int:
        """Branches."""
        return self.levels[-1].segments

    @property
    def kv_len(self) -> int:
        """Tokens that each branch reads."""
        return sum(level.tokens for level in self.levels)

    @property
    def token_bytes(self) -> int:
        """Bytes of K and V of one token in one layer, 16 bits a number."""
        return self.heads.kv * self.heads.dim * 4

    @property
    def tree_bytes(self) -> int:
        """Distinct KV."""
        return sum(level.segments * level.tokens for level in self.levels) * self.token_bytes

    @property
    def flat_bytes(self) -> int:
        """KV if every branch reads its own."""
        return self.num_rows * self.kv_len * self.token_bytes


def levels(*pairs: tuple[int, int]) -> tuple[Level, ...]:
    """Builds levels of (segments, tokens)."""
    return tuple(Level(*pair) for pair in pairs)


W1 = Workload("W1 1x2048+16x64", levels((1, 2048), (16, 64)))
W2 = Workload("W2 1x2048+64x64", levels((1, 2048), (64, 64)))
W3 = Workload("W3 1x16384+64x256", levels((1, 16384), (64, 256)))
W4 = Workload("W4 1x32768+256x128", levels((1, 32768), (256, 128)))
W5 = Workload("W5 1x8192+8x2048+64x256", levels((1, 8192), (8, 2048), (64, 256)))
W6 = Workload("W6 1x131072+16x512", levels((1, 131072), (16, 512)))
W7 = Workload("W7 64x4096 unshared", levels((64, 4096)))
W8 = Workload("W8 1x131072 single", levels((1, 131072)))
W9 = Workload("W9 1x2048+1024x32", levels((1, 2048), (1024, 32)))
W9_DEEP = Workload(
    "W9 deep 1..1024",
    levels((1, 512), (16, 256), (32, 128), (64, 64), (128, 32), (1024, 32)),
)
W2_SMALL = Workload("W2 heads 14/2/64", W2.levels, Heads(14, 2, 64))
W2_MHA = Workload("W2 heads 32/32/128", W2.levels, Heads(32, 32, 128))
WORKLOADS = (W3, W7, W1, W2, W5, W6, W8, W4, W9, W9_DEEP, W2_SMALL, W2_MHA)
"""In the order of measuring: what the targets name comes first."""
REHEARSAL = (
    Workload("R3 1x96+5x16", levels((1, 96), (5, 16)), Heads(4, 2, 16)),
    Workload("R7 3x48 unshared", levels((3, 48)), Heads(4, 2, 16)),
)


class Layout(NamedTuple):
    """A workload's tree over a pool of blocks."""

    plan: AttentionPlan
    tables: list[list[int]]
    """Block ids of each row's path."""
    num_blocks: int


def lay_out(workload: Workload, seed: int = 0) -> Layout:
    """Gives every segment blocks of its own, anywhere in the pool."""
    total = sum(level.segments * level.tokens for level in workload.levels)
    ids = list(range(total // BLOCK_SIZE))
    random.Random(seed).shuffle(ids)
    runs: list[KVRun] = []
    tables: list[list[int]] = [[] for _ in range(workload.num_rows)]
    start = taken = 0
    for level in workload.levels:
        assert level.tokens % BLOCK_SIZE == 0
        assert workload.num_rows % level.segments == 0
        count, below = level.tokens // BLOCK_SIZE, workload.num_rows // level.segments
        for segment in range(level.segments):
            blocks = ids[taken : taken + count]
            taken += count
            rows = range(segment * below, (segment + 1) * below)
            runs.append(KVRun(start, start + level.tokens, blocks, rows))
            for row in rows:
                tables[row] += blocks
        start += level.tokens
    kv_lens = [workload.kv_len] * workload.num_rows
    return Layout(AttentionPlan.build(runs, kv_lens, block_size=BLOCK_SIZE), tables, len(ids))


def random_layout(seed: int, *, num_rows: int, max_tokens: int) -> Layout:
    """Grows a tree whose branches end anywhere and fork at block boundaries."""
    rng = random.Random(seed)
    runs: list[KVRun] = []
    kv_lens = [0] * num_rows
    tables: list[list[int]] = [[] for _ in range(num_rows)]
    taken = 0

    def grow(start: int, rows: range) -> None:
        nonlocal taken
        is_leaf = len(rows) == 1
        tokens = rng.randint(1, max_tokens)
        tokens = tokens if is_leaf else -(-tokens // BLOCK_SIZE) * BLOCK_SIZE
        blocks = list(range(taken, taken - (-tokens // BLOCK_SIZE)))
        taken += len(blocks)
        runs.append(KVRun(start, start + tokens, blocks, rows))
        for row in rows:
            kv_lens[row] = start + tokens
            tables[row] += blocks
        if not is_leaf:
            middle = rng.randint(rows.start + 1, rows.stop - 1)
            grow(start + tokens, range(rows.start, middle))
            grow(start + tokens, range(middle, rows.stop))

    grow(0, range(num_rows))
    ids = list(range(taken))
    rng.shuffle(ids)
    moved = [run._replace(block_ids=[ids[block] for block in run.block_ids]) for run in runs]
    plan = AttentionPlan.build(moved, kv_lens, block_size=BLOCK_SIZE)
    return Layout(plan, [[ids[block] for block in table] for table in tables], taken)


class Prediction(NamedTuple):
    """Microseconds for one layer, in a graph, nothing in the cache beforehand."""

    tree: float
    flat: float


def predict(workload: Workload) -> Prediction:
    """Computes what memory and arithmetic allow, plus the fixed cost of the launches."""
    heads = workload.heads
    shared = sum(level.segments < workload.num_rows for level in workload.levels)
    partials = 0
    if shared:
        per_row = heads.query * (heads.dim + 1) * 4 * 2
        partials = (shared + 1) * workload.num_rows * per_row
    flop = 4 * workload.num_rows * workload.kv_len * heads.query * heads.dim
    least = flop / FLOP_PER_US
    tree = max((workload.tree_bytes + partials) / READ_BYTES_PER_US, least)
    flat = max(workload.flat_bytes / READ_BYTES_PER_US, least)
    return Prediction(tree + FIXED_US, flat + FIXED_US)


def unwritten(layout: Layout) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Marks the slots of the pool that no run holds."""
    free = np.ones(layout.num_blocks * BLOCK_SIZE, dtype=bool)
    for run in range(layout.plan.num_runs):
        plan = layout.plan
        free[plan.slots(run, plan.starts[run], plan.ends[run])] = False
    return free
