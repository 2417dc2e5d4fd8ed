"""Branches without a context tree: forks, copies and block ids laid out by hand for the runner.

Blocks come from a shuffled list, so that ids are neither consecutive nor in order. A child copies
the block its fork cuts at its first write; the parent goes on in place.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count, pairwise
from random import Random
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from agentkv.core.batch import Batch, BlockCopy
from agentkv.model.attention import use_agentkv_attention
from agentkv.model.hand_batch import BranchRows, Piece, batch_of
from agentkv.model.kv_cache import KVCache
from agentkv.model.model_runner import ModelRunner
from agentkv.model.model_shape import describe_model
from agentkv.model.sampler import Sampler


@dataclass(slots=True, eq=False)
class HandBranch:
    """One branch: its tokens, sealed pieces of its path, and the segment that grows."""

    tokens: list[int] = field(default_factory=list)
    sealed: list[Piece] = field(default_factory=list)
    segment_id: int = -1
    start: int = 0
    blocks: list[int] = field(default_factory=list)
    must_copy: bool = False

    def path(self, end: int) -> list[Piece]:
        grown = Piece(self.segment_id, self.start, end, tuple(self.blocks))
        return [*self.sealed, *([grown] if end > self.start else [])]


class HandForked:
    """A poisoned pool, a runner on it, and branches."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        block_size: int = 4,
        num_blocks: int = 64,
        poison: float = float("nan"),
        **runner_options: Any,
    ) -> None:
        self.model = model
        self.block_size = block_size
        self.kv = KVCache(describe_model(model), num_blocks=num_blocks, block_size=block_size)
        self.kv.poison(poison)
        self.runner = ModelRunner(model, self.kv, Sampler(), **runner_options)
        self._free = list(range(num_blocks))
        Random(7).shuffle(self._free)
        self._segment_ids = count()

    def create(self) -> HandBranch:
        return HandBranch(segment_id=next(self._segment_ids))

    def fork(self, parent: HandBranch, at: int | None = None) -> HandBranch:
        """Shares the parent's path below `at` (its head unless given) with a new branch."""
        head = len(parent.tokens)
        cut = head if at is None else at
        pieces = [piece for piece in parent.path(head) if piece.start < cut]
        child = HandBranch(
            parent.tokens[:cut],
            [piece._replace(end=min(piece.end, cut)) for piece in pieces],
            next(self._segment_ids),
            cut,
            must_copy=cut % self.block_size != 0,
        )
        parent.sealed = parent.path(head)  # sealed: a new segment goes on in the same last block
        parent.segment_id, parent.start = next(self._segment_ids), head
        parent.blocks = parent.blocks[-1:] if head % self.block_size else []
        return child

    def step(self, *work: tuple[HandBranch, Sequence[int]]) -> list[Tensor]:
        """Appends tokens to branches in one batch; returns each branch's logits, (n, vocab)."""
        heads = iter(self.runner.run(self.batch(*work, keep=True)).heads)
        return [torch.stack([_tensor(next(heads)) for _ in tokens]) for _, tokens in work]

    def batch(
        self, *work: tuple[HandBranch, Sequence[int]], keep: bool = False, **asked: Any
    ) -> Batch:
        """Takes blocks and commits the tokens, and writes the batch that computes them."""
        copies = [copy for branch, tokens in work for copy in self._grow(branch, tokens)]
        rows = [
            BranchRows(tuple(tokens), len(branch.tokens) - len(tokens), ())
            for branch, tokens in work
        ]
        return self._batch_of([b for b, _ in work], rows, keep=keep, copies=copies, **asked)

    def again(self, branch: HandBranch) -> Tensor:
        """Recomputes the last token for its logits alone, (vocab,), writing nothing."""
        rows = BranchRows((branch.tokens[-1],), len(branch.tokens) - 1, (), is_stored=False)
        return _tensor(self.runner.run(self._batch_of([branch], [rows], keep=True)).heads[0])

    def expected(self, branch: HandBranch, *, implementation: str = "eager") -> Tensor:
        """Logits of every token of a branch by plain transformers, (n, vocab)."""
        self.model.set_attn_implementation(implementation)
        with torch.inference_mode():
            logits: Tensor = self.model(torch.tensor([branch.tokens]), use_cache=False).logits
        use_agentkv_attention(self.model)
        return logits[0]

    def _grow(self, branch: HandBranch, tokens: Sequence[int]) -> list[BlockCopy]:
        copies = []
        head, size = len(branch.tokens), self.block_size
        if branch.must_copy:
            floor = head // size * size
            holder = next(piece for piece in branch.sealed if piece.start <= head - 1 < piece.end)
            source = holder.block_ids[floor // size - holder.start // size]
            branch.blocks = [self._free.pop()]
            copies.append(BlockCopy(source, branch.blocks[0], head - floor))
            kept = [piece for piece in branch.sealed if piece.start < floor]
            branch.sealed = [piece._replace(end=min(piece.end, floor)) for piece in kept]
            branch.start, branch.must_copy = floor, False
        branch.tokens.extend(tokens)
        needed = -(-len(branch.tokens) // size) - branch.start // size
        branch.blocks += [self._free.pop() for _ in range(needed - len(branch.blocks))]
        return copies

    def _batch_of(
        self, branches: list[HandBranch], rows: list[BranchRows], *, keep: bool, **asked: Any
    ) -> Batch:
        """Cuts the branches' pieces wherever any of them ends, so that equal parts are shared."""
        paths = [branch.path(len(branch.tokens)) for branch in branches]
        num_rows = sum(len(row.token_ids) for row in rows)
        return batch_of(
            [
                row._replace(path=tuple(self._cut(path, paths)))
                for row, path in zip(rows, paths, strict=True)
            ],
            block_size=self.block_size,
            heads=range(num_rows) if keep else asked.pop("heads", ()),
            **asked,
        )

    def _cut(self, path: list[Piece], paths: list[list[Piece]]) -> list[Piece]:
        cut: list[Piece] = []
        for piece in path:
            same = [p for other in paths for p in other if p.segment_id == piece.segment_id]
            bounds = {bound for p in same for bound in (p.start, p.end)}
            inside = sorted(b for b in bounds if piece.start <= b <= piece.end)
            for start, end in pairwise(inside):
                first = start // self.block_size - piece.start // self.block_size
                last = (end - 1) // self.block_size - piece.start // self.block_size
                # The growing end of a path keeps all ids: plans are moved on only if none change.
                ids = piece.block_ids[first : last + 1]
                cut.append(Piece(piece.segment_id, start, end, ids))
        return cut


def _tensor(head: object) -> Tensor:
    assert isinstance(head, Tensor)
    return head
