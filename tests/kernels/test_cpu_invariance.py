"""The native kernel gives a row the same bits whoever is there and however its path is cut."""

import random
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from agentkv_kernels import (
    AttentionPlan,
    KVRun,
    KVScales,
    allocate_kv,
    cpu_native,
    native,
    store_kv,
    tree_attention,
)

LEVELS = native.available_levels()
BLOCK = 16
NUM_KV_HEADS = 2


class Model(NamedTuple):
    """What attention is asked for."""

    group: int = 3
    dim: int = 64
    dtype: torch.dtype = torch.float32
    stored: torch.dtype | None = None
    """Of an 8-bit pool."""
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False


class Row(NamedTuple):
    """What a row sees, piece by piece: (first position, one past the last, block ids)."""

    path: tuple[tuple[int, int, tuple[int, ...]], ...]
    length: int


class Forest:
    """Random trees of runs; what their rows see is written down beside the runs."""

    def __init__(self, seed: int, num_rows: int) -> None:
        self.rng = random.Random(seed)
        self.rows: list[Row] = []
        self.runs: list[KVRun] = []
        self.num_blocks = 0
        while len(self.rows) < num_rows:
            self._grow(0, self.rng.randint(1, num_rows), self.rng.randint(0, 5), (), None)

    def _grow(
        self,
        start: int,
        num_rows: int,
        depth: int,
        path: tuple[tuple[int, int, tuple[int, ...]], ...],
        shared: int | None,
    ) -> None:
        lengths = (0, 1, self.rng.randint(1, 70), self.rng.randint(1, 700))
        length = self.rng.choice(lengths)
        is_leaf = depth == 0 or num_rows == 1
        if is_leaf:
            length = max(length, num_rows)
        end = start + length
        needed = -(-end // BLOCK) - start // BLOCK if length else 0
        ids = list(range(self.num_blocks, self.num_blocks + needed))
        self.num_blocks += needed
        if ids and shared is not None and start % BLOCK:
            ids[0] = shared
        path = (*path, (start, end, tuple(ids)))
        first, index = len(self.rows), len(self.runs)
        self.runs.append(KVRun(start, end, ids, ()))
        if is_leaf:
            self.rows += [Row(path, max(1, end - num_rows + 1 + i)) for i in range(num_rows)]
        last, left = ids[-1] if ids else shared, 0 if is_leaf else num_rows
        while left:
            share = self.rng.randint(1, left)
            left -= share
            self._grow(end, share, depth - 1, path, last)
            last = None
        self.runs[index] = self.runs[index]._replace(rows=range(first, len(self.rows)))

    def plan(self) -> AttentionPlan:
        lengths = [row.length for row in self.rows]
        return AttentionPlan.build(self.runs, lengths, block_size=BLOCK)


class Pool(NamedTuple):
    """Tensors for a forest; `attend` reads them, or copies of parts of them."""

    model: Model
    query: Tensor
    kv: Tensor
    scales: KVScales | None
    sinks: Tensor | None

    @classmethod
    def of(cls, forest: Forest, model: Model) -> "Pool":
        generator = torch.Generator().manual_seed(7)
        size = (2, forest.num_blocks, BLOCK, NUM_KV_HEADS, model.dim)
        kv = torch.randn(size, generator=generator).to(model.dtype)
        num_heads = NUM_KV_HEADS * model.group
        query = torch.randn(len(forest.rows), num_heads, model.dim, generator=generator)
        sinks = torch.randn(num_heads, generator=generator) if model.sinks else None
        scales = None
        if model.stored is not None:
            factors = torch.zeros(2, *size[1:4])
            scales = KVScales(factors[0], factors[1])
            rounded = allocate_kv(1, *size[1:], dtype=model.stored, device="cpu")[0]
            slots = torch.arange(forest.num_blocks * BLOCK)
            old = kv.flatten(1, 2)
            store_kv(old[0], old[1], rounded[0], rounded[1], slots, scales=scales)
            kv = rounded
        return cls(model, query.to(model.dtype), kv, scales, sinks)

    def attend(self, query: Tensor, plan: AttentionPlan) -> Tensor:
        return tree_attention(
            query,
            self.kv[0],
            self.kv[1],
            plan,
            scale=self.model.dim**-0.5,
            window=self.model.window,
            softcap=self.model.softcap,
            sinks=self.sinks,
            scales=self.scales,
        )

    def alone(self, row: Row) -> "Pool":
        """A pool where one row's tokens lie one after the other, and nothing else but NaN."""
        num_blocks = -(-row.length // BLOCK)
        empty = 0 if self.scales else torch.nan
        kv = torch.full((2, num_blocks, *self.kv.shape[2:]), empty, dtype=self.kv.dtype)
        factors = torch.full((2, num_blocks, BLOCK, NUM_KV_HEADS), torch.nan)
        for start, end, ids in row.path:
            for position in range(start, min(end, row.length)):
                block, offset = divmod(position, BLOCK)
                source = ids[block - start // BLOCK]
                kv[:, block, offset] = self.kv[:, source, offset]
                for side, known in enumerate(self.scales or ()):
                    factors[side, block, offset] = known[source, offset]
        scales = KVScales(factors[0], factors[1]) if self.scales else None
        return self._replace(kv=kv, scales=scales)


def alone_plan(rng: random.Random, length: int) -> AttentionPlan:
    """One row over a pool of its own: one run, or one cut in two anywhere."""
    ids = range(-(-length // BLOCK))
    cut = rng.choice((0, rng.randint(0, length)))
    runs = [
        KVRun(0, cut, ids[: -(-cut // BLOCK)], [0]),
        KVRun(cut, length, ids[cut // BLOCK :], [0]),
    ]
    return AttentionPlan.build(runs, [length], block_size=BLOCK)


@pytest.fixture
def threads() -> object:
    """Puts the number of threads back."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


MODELS = [
    Model(),
    Model(group=1, dim=20, softcap=4.0),
    Model(group=4, dim=128, window=100),
    Model(group=16, dim=64, window=700, sinks=True),
    Model(dtype=torch.bfloat16),
    Model(group=5, stored=torch.int8),
]


@pytest.mark.parametrize("model", MODELS, ids=str)
@pytest.mark.usefixtures("threads")
def test_a_row_alone_and_among_others(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches sums whose order depends on siblings, cuts, threads, or the kind of processor."""
    for seed in range(3):
        forest = Forest(seed, 24)
        pool, rng = Pool.of(forest, model), random.Random(seed)
        results = []
        for level in dict.fromkeys([LEVELS[0], LEVELS[-1]]):
            library = native.native_at(level)
            monkeypatch.setattr(cpu_native, "find_library", lambda found=library: found)
            for num_threads in (1, 2, 3):
                torch.set_num_threads(num_threads)
                results.append(pool.attend(pool.query, forest.plan()))
        assert all(torch.equal(result, results[0]) for result in results)
        for index, row in enumerate(forest.rows):
            torch.set_num_threads(rng.randint(1, 3))
            plan = alone_plan(rng, row.length)
            got = pool.alone(row).attend(pool.query[index : index + 1], plan)
            assert torch.equal(got[0], results[0][index]), (seed, index)


@pytest.mark.usefixtures("threads")
def test_a_chunk_and_one_token_after_the_other() -> None:
    """Catches rows of a chunk that are computed otherwise than the same tokens one by one."""
    model, length = Model(), 1300
    torch.set_num_threads(2)
    forest = Forest(0, 1)
    forest.num_blocks = -(-length // BLOCK)
    forest.rows = [Row((), position + 1) for position in range(length)]
    pool = Pool.of(forest, model)
    ids = range(forest.num_blocks)
    whole = [KVRun(0, length, ids, range(length))]
    plan = AttentionPlan.build(whole, range(1, length + 1), block_size=BLOCK)
    expected = pool.attend(pool.query, plan)
    for first, count in ((0, 1), (63, 2), (500, 37), (511, 2), (700, 130), (1299, 1)):
        end = first + count
        runs = [KVRun(0, end, ids[: -(-end // BLOCK)], range(count))]
        lengths = range(first + 1, end + 1)
        got = pool.attend(
            pool.query[first:end], AttentionPlan.build(runs, lengths, block_size=BLOCK)
        )
        assert torch.equal(got, expected[first:end])


@pytest.mark.usefixtures("threads")
def test_many_spans() -> None:
    """Catches long paths, where spans grow, being added up in another order by a task of a few."""
    model, length = Model(group=2, dim=8), 21_000
    forest = Forest(0, 1)
    forest.num_blocks = -(-length // BLOCK) + 40
    forest.rows = [Row((), length)] * 40
    pool = Pool.of(forest, model)
    ids = range(forest.num_blocks)
    runs = [KVRun(0, length - 9, ids[: -(-(length - 9) // BLOCK)], range(40))]
    start = (length - 9) // BLOCK
    for row in range(40):
        own = ids[start : -(-length // BLOCK)]
        runs.append(KVRun(length - 9, length, own, [row]))
    plan = AttentionPlan.build(runs, [length] * 40, block_size=BLOCK)
    alone = AttentionPlan.build(
        [KVRun(0, length, ids[: -(-length // BLOCK)], [0])], [length], block_size=BLOCK
    )
    for num_threads in (1, 3):
        torch.set_num_threads(num_threads)
        together = pool.attend(pool.query, plan)
        for row in (0, 17, 39):
            assert torch.equal(pool.attend(pool.query[row : row + 1], alone)[0], together[row])
