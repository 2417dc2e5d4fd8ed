"""Draws tokens from edited logits by inverting each row's distribution at its random number.

    scores -> / temperature -> filters -> whole weights -> first token whose running sum of
    weights exceeds u * total

In torch, on whole rows: on a GPU, where no native kernels are, and to say what those compute. The
kernels (`agentkv_kernels.drawing`) may round a weight the other way, where it lies halfway between
two whole numbers. It knows no batch and no requests.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from agentkv.model.filters import filtered_weights
from agentkv.model.row_chunks import row_chunks
from agentkv.model.upload import upload
from agentkv.sampling_params import SamplingParams

_BLOCK = 64
"""Tokens summed up at once: one of the sums is chosen, then one of its tokens."""


def draw_tokens(scores: Tensor, params: Sequence[SamplingParams], numbers: Tensor) -> Tensor:
    """Draws one token for each row.

    Args:
        scores: (num_rows, vocab_size), float32; a finite greatest value in each row.
        params: Temperature and filters of each row; none greedy.
        numbers: (num_rows,), float64, in [0, 1).

    Returns:
        (num_rows,) token ids, int64.
    """
    found = []
    for rows in row_chunks(range(len(params)), scores):
        part = slice(rows[0], rows[-1] + 1)
        weights = filtered_weights(_cooled(scores[part], params[part]), params[part])
        found.append(invert(weights, numbers[part]))
    return torch.cat(found)


def _cooled(scores: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Divides by the temperature, in float64.

    The greatest score becomes 0 before it is divided: no temperature can make it overflow.
    """
    temperatures = upload([each.temperature for each in params], torch.float64, scores.device)
    greatest = scores.amax(dim=-1, keepdim=True)
    return scores.double().sub_(greatest).div_(temperatures[:, None])


def invert(weights: Tensor, numbers: Tensor) -> Tensor:
    """Finds each row's first column whose running sum of weights exceeds number * total.

    Args:
        weights: (num_rows, num_columns), float64, whole numbers of a sum of at most 2**53.
        numbers: (num_rows,), float64, in [0, 1).

    Returns:
        (num_rows,) columns, int64, none of weight 0.
    """
    num_rows, width = weights.shape
    if width % _BLOCK:
        weights = torch.nn.functional.pad(weights, (0, -width % _BLOCK))
    blocks = weights.view(num_rows, -1, _BLOCK)
    sums = blocks.sum(dim=-1)
    running = sums.cumsum(dim=-1)
    total = running[:, -1]
    target = torch.minimum((numbers * total).floor_(), total - 1)[:, None]
    block = torch.searchsorted(running, target, right=True)
    before = running.gather(1, block) - sums.gather(1, block)
    inner = blocks.take_along_dim(block[:, :, None], dim=1).squeeze(1).cumsum(dim=-1)
    column = torch.searchsorted(inner, target - before, right=True)
    return (block * _BLOCK + column).squeeze(1)
