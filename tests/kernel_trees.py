"""Random trees of KV runs, and caches in which everything no row sees is poison."""

import math
import random
from dataclasses import dataclass

import torch
from torch import Tensor

from agentkv_kernels import AttentionPlan, KVRun


@dataclass(frozen=True, slots=True)
class Tree:
    """Runs over one pool of blocks, and the rows that read them."""

    block_size: int
    num_blocks: int
    runs: tuple[KVRun, ...]
    kv_lens: tuple[int, ...]

    def plan(self) -> AttentionPlan:
        return AttentionPlan.build(self.runs, self.kv_lens, block_size=self.block_size)

    def slot(self, run: KVRun, position: int) -> int:
        """Where a position of a run lies, straight from the definition."""
        block = run.block_ids[position // self.block_size - run.start // self.block_size]
        return block * self.block_size + position % self.block_size

    def visible_slots(self, row: int, window: int | None = None) -> list[int]:
        """Slots a row attends to, straight from the definition."""
        kv_len = self.kv_lens[row]
        low = 0 if window is None else kv_len - window
        return [
            self.slot(run, position)
            for run in self.runs
            if row in run.rows
            for position in range(run.start, min(run.end, kv_len))
            if position >= low
        ]


class TreeMaker:
    """Grows one random tree; every choice comes from the seed."""

    def __init__(self, seed: int, block_size: int, *, permuted: bool) -> None:
        self.rng = random.Random(seed)
        self.block_size = block_size
        self.permuted = permuted
        self.runs: list[KVRun] = []
        self.kv_lens: list[int] = []
        self.num_blocks = 0

    def make(self, num_rows: int, *, max_depth: int = 8, max_len: int = 40) -> Tree:
        """Returns a forest with about that many rows, branches of one or several rows each."""
        while len(self.kv_lens) < num_rows:
            wanted = num_rows - len(self.kv_lens)
            if wanted > 3 and self.rng.random() < 0.3:
                wanted = self.rng.randint(1, wanted)
            self._grow(0, wanted, self.rng.randint(1, max_depth), max_len, None)
        ids = list(range(self.num_blocks))
        if self.permuted:
            self.rng.shuffle(ids)
        # Ancestors first: a run is listed when it is left, so their order is reversed.
        runs = [run._replace(block_ids=tuple(ids[i] for i in run.block_ids)) for run in self.runs]
        runs.reverse()
        return Tree(self.block_size, self.num_blocks, tuple(runs), tuple(self.kv_lens))

    def _grow(
        self, start: int, num_rows: int, depth: int, max_len: int, shared: int | None
    ) -> None:
        """Adds a segment from `start` and everything below; `shared` is its parent's last block."""
        length = self.rng.choice((0, 1, self.rng.randint(1, max_len), self.rng.randint(1, max_len)))
        first_row = len(self.kv_lens)
        leaf = depth == 1 or num_rows == 1
        if leaf:
            # A branch with several new tokens, or siblings that stand at the same segment.
            length = max(length, num_rows if self.rng.random() < 0.7 else 1)
        end = start + length
        size = self.block_size
        needed = -(-end // size) - start // size if length else 0
        ids = list(range(self.num_blocks, self.num_blocks + needed))
        self.num_blocks += needed
        if ids and shared is not None and start % size:
            ids[0] = shared  # the one that writes in place
        if leaf:
            for i in range(num_rows):
                kv_len = max(1, end - num_rows + 1 + i)
                self.kv_lens.append(self.rng.randint(0, end) if self.rng.random() < 0.1 else kv_len)
        else:
            last = ids[-1] if ids else shared
            left = num_rows
            while left:
                share = self.rng.randint(1, left)
                left -= share
                self._grow(end, share, depth - 1, max_len, last)
                last = None
        self.runs.append(KVRun(start, end, ids, range(first_row, len(self.kv_lens))))


def random_tree(
    seed: int, *, block_size: int = 4, num_rows: int = 12, max_len: int = 40, permuted: bool = True
) -> Tree:
    """A forest whose segments begin and end anywhere, with empty and one-token ones."""
    return TreeMaker(seed, block_size, permuted=permuted).make(num_rows, max_len=max_len)


def decode_tree(num_rows: int, prefix: int, own: int) -> Tree:
    """One shared prefix and `num_rows` branches with `own` tokens each, blocks of 16."""
    ids = list(range(-(-prefix // 16) + num_rows * (-(-own // 16) + 1)))
    count, head = len(ids), -(-prefix // 16)
    runs = [KVRun(0, prefix, ids[:head], range(num_rows))]
    for row in range(num_rows):
        needed = -(-(prefix + own) // 16) - prefix // 16
        runs.append(KVRun(prefix, prefix + own, ids[head : head + needed], range(row, row + 1)))
        head += needed
    return Tree(16, count, tuple(runs), (prefix + own,) * num_rows)


def chunk_tree(*chunks: tuple[int, int], prefix: int = 20) -> Tree:
    """A shared prefix, and below it a branch per (length, new rows); blocks of 4."""
    num_rows = sum(rows for _, rows in chunks)
    head, row = -(-prefix // 4), 0
    runs = [KVRun(0, prefix, range(head), range(num_rows))]
    kv_lens: list[int] = []
    for length, rows in chunks:
        end = prefix + length
        needed = -(-end // 4) - prefix // 4
        runs.append(KVRun(prefix, end, range(head, head + needed), range(row, row + rows)))
        kv_lens.extend(range(end - rows + 1, end + 1))
        head, row = head + needed, row + rows
    return Tree(4, head, tuple(runs), tuple(kv_lens))


def permute_blocks(tree: Tree) -> Tree:
    """The same tree with its blocks elsewhere in the pool, so that hardly any are consecutive."""
    ids = list(range(tree.num_blocks))
    random.Random(3).shuffle(ids)
    runs = tuple(run._replace(block_ids=tuple(ids[i] for i in run.block_ids)) for run in tree.runs)
    return Tree(tree.block_size, tree.num_blocks, runs, tree.kv_lens)


@dataclass(frozen=True, slots=True)
class Inputs:
    """What one layer gets."""

    query: Tensor
    k_cache: Tensor
    v_cache: Tensor
    scale: float


def make_inputs(
    tree: Tree,
    *,
    num_kv_heads: int = 2,
    group: int = 3,
    head_dim: int = 16,
    v_head_dim: int | None = None,
    dtype: torch.dtype = torch.float32,
    window: int | None = None,
    poison: float = math.nan,
) -> Inputs:
    """Random tensors; slots that no row sees hold `poison`."""
    generator = torch.Generator().manual_seed(7)
    num_slots = tree.num_blocks * tree.block_size
    seen: set[int] = set()
    for row in range(len(tree.kv_lens)):
        seen.update(tree.visible_slots(row, window))
    unseen = torch.ones(num_slots, dtype=torch.bool)
    unseen[sorted(seen)] = False

    def cache(dim: int) -> Tensor:
        values = torch.randn(num_slots, num_kv_heads, dim, generator=generator).to(dtype)
        values[unseen] = poison
        return values.view(tree.num_blocks, tree.block_size, num_kv_heads, dim)

    query = torch.randn(len(tree.kv_lens), num_kv_heads * group, head_dim, generator=generator)
    k_cache, v_cache = cache(head_dim), cache(v_head_dim or head_dim)
    return Inputs(query.to(dtype), k_cache, v_cache, scale=1.5 * head_dim**-0.5)


def norm_error(got: Tensor, expected: Tensor) -> float:
    """Relative error in the Euclidean norm; 0 when both are zero, NaN when one is not finite."""
    difference = (got.double() - expected.double()).norm()
    return float(difference / expected.double().norm().clamp_min(1e-30))
