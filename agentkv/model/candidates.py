"""The most likely tokens of each row, in the order of their ids: what filters can leave.

Filters mostly leave some dozen of fifty thousand tokens. Selecting a thousand candidates costs one
pass over float32; everything after it, in float64, is then cheap. For a CPU: how many tokens there
are depends on the values, which a GPU would have to be waited for.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from agentkv.model.filters import kth_largest

_GROUP = 16
"""Tokens in a group whose maximum is taken first; their ids lie far apart."""
_LOWEST = float(np.finfo(np.float32).min)


class Candidates(NamedTuple):
    """Some tokens of each row; rows are filled up with tokens of score -inf."""

    token_ids: Tensor
    """(num_rows, num_candidates), int64, ascending but for the filling."""
    scores: Tensor
    """(num_rows, num_candidates), float32."""
    least: Tensor
    """(num_rows,), float32: every token with a score above -inf and at least this is there."""


def candidates(scores: Tensor, counts: Sequence[int], floors: Tensor | None = None) -> Candidates:
    """Selects at least each row's `counts` most likely tokens: all whose score reaches some bound.

    Args:
        scores: (num_rows, vocab_size), float32, on a CPU; a row with NaN gives anything.
        counts: At least 1 for each row; a row that has fewer tokens above -inf gives those.
        floors: (num_rows, 1), float32: tokens below are left out even so. None: no floors.
    """
    vocab_size = scores.shape[1]
    array = scores.numpy()
    least = _bound(scores, [min(count, vocab_size) for count in counts]).clamp_(min=_LOWEST)
    if floors is not None:
        least = torch.maximum(least, floors)
    found = np.flatnonzero(array >= least.numpy())
    rows, token_ids = np.divmod(found, vocab_size)
    sizes = np.bincount(rows, minlength=len(counts))
    places = np.arange(len(found)) - np.repeat(sizes.cumsum() - sizes, sizes)
    kept_ids = np.zeros((len(counts), sizes.max(initial=1)), np.int64)
    kept_scores = np.full(kept_ids.shape, -np.inf, np.float32)
    kept_ids[rows, places] = token_ids
    kept_scores[rows, places] = array.ravel()[found]
    return Candidates(torch.from_numpy(kept_ids), torch.from_numpy(kept_scores), least.squeeze(1))


def _bound(scores: Tensor, counts: Sequence[int]) -> Tensor:
    """Finds a score that at least `counts` tokens of each row reach, (num_rows, 1).

    The k-th largest of the maxima of disjoint groups is such a score, since each of k groups has a
    token that reaches it; and few others do, while there are more groups than tokens wanted.
    """
    num_rows, vocab_size = scores.shape
    num_groups = vocab_size // _GROUP
    if 2 * max(counts) > num_groups:
        return kth_largest(scores, counts)
    groups = scores[:, : num_groups * _GROUP].view(num_rows, _GROUP, num_groups)
    return kth_largest(groups.amax(dim=1), counts)
