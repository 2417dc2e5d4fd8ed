"""Sends small lists from the host to a device without waiting for it.

`torch.tensor(numbers, device=...)` waits until everything queued on a GPU is done. A step sends a
dozen of such lists, so each would cost the time that the host could have been ahead.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Numbers = Sequence[int] | Sequence[float] | Sequence[Sequence[int]]


def upload(numbers: Numbers, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Makes a tensor of numbers on a device; ordered by the current stream, as a kernel is.

    Args:
        numbers: Flat, or rows of equal length.
        dtype: Of the tensor.
        device: Where to.
    """
    if device.type != "cuda":
        return torch.tensor(numbers, dtype=dtype, device=device)
    # Pinned memory is handed back to torch's own pool, which reuses it once the copy is done.
    pinned = torch.tensor(numbers, dtype=dtype, pin_memory=True)
    return pinned.to(device, non_blocking=True)


def upload_array(values: NDArray[np.generic], device: torch.device) -> Tensor:
    """Makes a tensor of a writable array on a device, which on a CPU shares its memory."""
    tensor = torch.from_numpy(values)
    if device.type != "cuda":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)
