"""Logits of one step's rows and of heads kept by earlier steps, as one supply.

It bounds how much is converted to float32 at once. It knows no sampling.
"""

from collections.abc import Iterator, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from agentkv.core.batch import Sample, Score
from agentkv.model.upload import upload

_Asked = TypeVar("_Asked", Sample, Score)


class LogitSource:
    """Finds the logits of what a batch asks for."""

    def __init__(self, logits: Tensor | None, rows: Sequence[int], slice_bytes: int) -> None:
        """Takes a step's logits over.

        Args:
            logits: (len(rows), vocab_size), or None when nothing ran.
            rows: The batch's rows that they are of, ascending.
            slice_bytes: Most bytes of fp32 logits in one slice.
        """
        self._logits = logits
        self._index_of = {row: index for index, row in enumerate(rows)}
        self._slice_bytes = slice_bytes

    def keep(self, row: int) -> Tensor:
        """Copies a row's logits out of the step, (vocab_size,) fp32."""
        return self._row(row).to(torch.float32, copy=True)

    def slices(self, asked: Sequence[_Asked]) -> Iterator[Sequence[_Asked]]:
        """Cuts a list into parts whose logits stay below the bound."""
        if not asked:
            return
        vocab_size = self._of(asked[0]).shape[-1]
        step = max(1, self._slice_bytes // (4 * vocab_size))
        for start in range(0, len(asked), step):
            yield asked[start : start + step]

    def gather(self, asked: Sequence[Sample] | Sequence[Score]) -> Tensor:
        """Collects the logits of each, (len(asked), vocab_size) fp32."""
        rows = [item.row for item in asked if item.row is not None]
        if len(rows) < len(asked):
            return torch.stack([self._of(item).float() for item in asked])
        assert self._logits is not None
        indices = [self._index_of[row] for row in rows]
        if indices == list(range(len(indices))):  # the usual step of decoding: no copy
            return self._logits[: len(indices)].float()
        places = upload(indices, torch.int64, self._logits.device)
        return self._logits.index_select(0, places).float()

    def _of(self, asked: Sample | Score) -> Tensor:
        if asked.row is not None:
            return self._row(asked.row)
        assert isinstance(asked.head, Tensor), "neither a row nor a kept head"
        return asked.head

    def _row(self, row: int) -> Tensor:
        assert self._logits is not None, "a row is asked for, but the batch has none"
        return self._logits[self._index_of[row]]
