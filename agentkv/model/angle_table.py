"""Cosines and sines of a rotary embedding by position, computed once by the model's own module.

On a CPU a step takes its rows from the table: no threads of torch are woken for a few numbers, and
a row's angles do not depend on the other rows. It knows no model beyond the module.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from agentkv_kernels.int8_layers import Angles

_BLOCK = 1024
"""Positions computed at a time."""


class AngleTable:
    """The angles of every position seen so far, if they depend on nothing else."""

    def __init__(self, rotary: nn.Module) -> None:
        """Takes the module; it is asked anew where frequencies follow the longest position."""
        self._rotary: Any = rotary
        kind = getattr(rotary, "rope_type", None)
        self._is_fixed = isinstance(kind, str) and "dynamic" not in kind and kind != "longrope"
        self._cosines = np.empty((0, 0), np.float32)
        self._sines = self._cosines

    def at(self, hidden: Tensor, positions: Tensor) -> Angles:
        """Looks rows up.

        Args:
            hidden: What the module reads dtype and device of: float32 on a CPU.
            positions: (1, num_rows) int64, at least 0.
        """
        if not self._is_fixed:
            return Angles(*self._rotary(hidden, position_ids=positions))
        index = positions[0].numpy()
        while index.max() >= len(self._cosines):
            self._grow(hidden)
        cosines, sines = self._cosines[index], self._sines[index]
        return Angles(torch.from_numpy(cosines)[None], torch.from_numpy(sines)[None])

    def _grow(self, hidden: Tensor) -> None:
        begin = len(self._cosines)
        positions = torch.arange(begin, begin + _BLOCK)[None]
        cosines, sines = (part[0].numpy() for part in self._rotary(hidden, position_ids=positions))
        is_first = begin == 0
        self._cosines = cosines if is_first else np.concatenate((self._cosines, cosines))
        self._sines = sines if is_first else np.concatenate((self._sines, sines))
