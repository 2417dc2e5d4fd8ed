"""Keeps rows of logits to the tokens they may choose. It knows bits, and no grammar."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from agentkv.core.batch import Sample


def keep_allowed(logits: Tensor, samples: Sequence[Sample]) -> Tensor:
    """Takes away the tokens that a row may not choose.

    Args:
        logits: (num_samples, vocab_size), any floating dtype; not changed.
        samples: What each row asks for; waits for the bits of those that are constrained.

    Returns:
        (num_samples, vocab_size); -inf where a token may not be chosen. The same tensor when no
        row is constrained.
    """
    rows = [row for row, sample in enumerate(samples) if sample.allowed is not None]
    if not rows:
        return logits
    bits = [sample.allowed.bits() for sample in samples if sample.allowed is not None]
    packed = np.frombuffer(b"".join(bits), dtype=np.uint8).reshape(len(rows), -1)
    allowed = _unpacked(packed, logits)
    if len(rows) == len(samples):
        return torch.where(allowed, logits, -torch.inf)
    kept = logits.clone()
    index = torch.tensor(rows, device=logits.device)
    kept[index] = torch.where(allowed, logits[index], -torch.inf)
    return kept


def _unpacked(packed: "np.ndarray[tuple[int, int], np.dtype[np.uint8]]", logits: Tensor) -> Tensor:
    """Spreads bits, (num_rows, num_bytes), to one boolean for each token of the vocabulary."""
    width = logits.shape[1]
    if logits.device.type == "cpu":
        spread = np.unpackbits(packed, axis=1, count=width, bitorder="little")
        return torch.from_numpy(spread.view(np.bool_))
    eighths = torch.from_numpy(packed.copy()).to(logits.device, non_blocking=True)
    shifts = torch.arange(8, dtype=torch.uint8, device=logits.device)
    return ((eighths[:, :, None] >> shifts) & 1).flatten(1)[:, :width].bool()
