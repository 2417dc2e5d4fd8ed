"""The rows of one step on the device: token ids, positions and slots.

Owns padding: a padded row computes token 0 at position 0, is written nowhere and reads nothing. It
knows no model and no plan.
"""

from typing import NamedTuple, Self

import torch
from torch import Tensor

from agentkv.core.batch import NO_SLOT, Batch
from agentkv.model.upload import upload


class StepRows(NamedTuple):
    """What the model is given."""

    token_ids: Tensor
    """(num_rows,) int64."""
    positions: Tensor
    """(num_rows,) int64."""
    slots: Tensor
    """(num_rows,) int64, NO_SLOT where nothing is written."""
    is_writing: bool
    """Whether any row has a slot."""

    @classmethod
    def of(cls, batch: Batch, num_rows: int, device: torch.device) -> Self:
        """Uploads the rows of a batch, padded to `num_rows`, in one transfer."""
        is_writing = any(slot != NO_SLOT for slot in batch.slots)
        token_ids, positions, slots = _padded(batch, num_rows, device)
        return cls(token_ids, positions, slots, is_writing)


class StaticRows:
    """Room for the rows of any step up to a size, at addresses that never change.

    A captured graph reads from here; `load` puts the next step's rows in, in the order of the
    current stream.
    """

    def __init__(self, capacity: int, device: torch.device) -> None:
        """Allocates room for `capacity` rows, all of them padding."""
        self._numbers = torch.zeros((3, capacity), dtype=torch.int64, device=device)
        self._numbers[2] = NO_SLOT

    def load(self, batch: Batch, num_rows: int) -> None:
        """Puts a batch into the first `num_rows` rows; those that it does not fill are padding."""
        self._numbers[:, :num_rows] = _padded(batch, num_rows, self._numbers.device)

    def first(self, num_rows: int) -> StepRows:
        """Returns views of the first rows; they count as writing, since a later step's may."""
        token_ids, positions, slots = self._numbers[:, :num_rows]
        return StepRows(token_ids, positions, slots, is_writing=True)


def _padded(batch: Batch, num_rows: int, device: torch.device) -> Tensor:
    """Uploads token ids, positions and slots, (3, num_rows)."""
    padding = num_rows - batch.num_rows
    assert padding >= 0, "more rows than there is room for"
    zeros = [0] * padding
    columns = [
        [*batch.token_ids, *zeros],
        [*batch.positions, *zeros],
        [*batch.slots, *([NO_SLOT] * padding)],
    ]
    return upload(columns, torch.int64, device)
