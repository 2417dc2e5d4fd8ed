"""Batches made by hand: a few branches whose blocks the caller lays out itself.

The scheduler writes real Batches from the context tree. The golden check has no tree and needs
one all the same; it names the runs of each branch's path and the tokens to compute.
"""

from collections.abc import Sequence
from typing import NamedTuple

from agentkv.core.batch import NO_SLOT, Batch, BlockCopy, Run, Sample, Score


class Piece(NamedTuple):
    """KV positions [start, end) of a path; equal pieces of neighbouring branches become one Run."""

    segment_id: int
    start: int
    end: int
    block_ids: tuple[int, ...]
    """Blocks from the one that holds `start` on."""


class BranchRows(NamedTuple):
    """Consecutive tokens of one branch that the step computes."""

    token_ids: tuple[int, ...]
    start: int
    """Position of the first."""
    path: tuple[Piece, ...]
    """Pieces that cover [0, start + len(token_ids)), in order."""
    is_stored: bool = True
    """Whether KV is written; False for rows computed for their logits alone."""


def batch_of(
    branches: Sequence[BranchRows],
    *,
    block_size: int,
    copies: Sequence[BlockCopy] = (),
    samples: Sequence[Sample] = (),
    heads: Sequence[int] = (),
    scores: Sequence[Score] = (),
) -> Batch:
    """Lays the branches' tokens out as rows, in the order given.

    Args:
        branches: What to compute.
        block_size: Token positions per block.
        copies: Done before any row is written.
        samples: As in `Batch`; rows count through all branches.
        heads: As in `Batch`.
        scores: As in `Batch`.
    """
    token_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    runs: list[Run] = []
    for branch in branches:
        _read_path(runs, branch.path, first_row=len(token_ids), num_rows=len(branch.token_ids))
        for position, token in enumerate(branch.token_ids, branch.start):
            token_ids.append(token)
            positions.append(position)
            slots.append(_slot(branch, position, block_size) if branch.is_stored else NO_SLOT)
    return Batch(
        token_ids=tuple(token_ids),
        positions=tuple(positions),
        slots=tuple(slots),
        runs=tuple(runs),
        copies=tuple(copies),
        samples=tuple(samples),
        heads=tuple(heads),
        scores=tuple(scores),
    )


def _read_path(runs: list[Run], path: tuple[Piece, ...], *, first_row: int, num_rows: int) -> None:
    """Adds rows to the runs that the branch before read too, and new runs for the rest."""
    for piece in path:
        for index, run in enumerate(runs):
            if run[:4] == piece and run.first_row + run.num_rows == first_row:
                runs[index] = run._replace(num_rows=run.num_rows + num_rows)
                break
        else:
            runs.append(Run(*piece, first_row, num_rows))


def _slot(branch: BranchRows, position: int, block_size: int) -> int:
    piece = next(piece for piece in branch.path if piece.start <= position < piece.end)
    block_id = piece.block_ids[position // block_size - piece.start // block_size]
    return block_id * block_size + position % block_size
