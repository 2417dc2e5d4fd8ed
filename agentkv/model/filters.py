"""Which tokens stay, and with what share of the probability: top-k, top-p, min-p, typical-p.

    scores -> top-k -> weights -> top-p -> min-p -> typical-p

Order and meaning are those of transformers' processors. Probabilities are whole numbers held in
float64, so that their sums are exact: a sum of arbitrary floating-point numbers depends on how a
kernel splits the work, and so on the shape of the batch.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from agentkv.model.upload import upload
from agentkv.sampling_params import SamplingParams

_MEAN_UNIT = 2.0**44
"""A mean score lies in (-2**5, 0], so sums of whole numbers of this unit are exact in float64."""


def weight_unit(vocab_size: int) -> float:
    """Weight of the most likely token: such that a row of them sums to at most 2**53."""
    return 2.0 ** (53 - vocab_size.bit_length())


def weigh(scores: Tensor) -> Tensor:
    """Gives every token its share of the probability, to within half a unit.

    Args:
        scores: (num_rows, vocab_size), float64, divided by the temperature, at most 0, the
            greatest of each row exactly 0; overwritten.

    Returns:
        (num_rows, vocab_size), float64, whole numbers.
    """
    return scores.exp_().mul_(weight_unit(scores.shape[1])).round_()


def filtered_weights(scores: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Gives every token its share of the probability that the filters leave.

    Args:
        scores: (num_rows, vocab_size), as for `weigh`; overwritten.
        params: The filters of each row.

    Returns:
        (num_rows, vocab_size), float64, whole numbers; at least one positive in every row.
    """
    vocab_size = scores.shape[1]
    top_ks = {row: each.top_k for row, each in enumerate(params) if each.top_k is not None}
    _apply_top_k(scores, {row: k for row, k in top_ks.items() if k < vocab_size})
    typical_ps = _below_one([each.typical_p for each in params])
    compared = scores[upload(list(typical_ps), torch.int64, scores.device)]
    weights = weigh(scores)
    _apply_top_p(weights, _below_one([each.top_p for each in params]))
    if any(each.min_p for each in params):
        least = weight_unit(vocab_size) * _column([each.min_p or 0.0 for each in params], weights)
        weights.masked_fill_(weights < least, 0)
    _apply_typical_p(weights, compared, typical_ps)
    return weights


def _below_one(options: Sequence[float | None]) -> dict[int, float]:
    return {row: p for row, p in enumerate(options) if p is not None and p < 1.0}


def _apply_top_k(scores: Tensor, top_ks: dict[int, int]) -> None:
    """Drops what is less likely than a row's k-th token; those equal to it stay."""
    if not top_ks:
        return
    rows = upload(list(top_ks), torch.int64, scores.device)
    chosen = scores[rows]
    least = kth_largest(chosen, list(top_ks.values()))
    scores[rows] = chosen.masked_fill_(chosen < least, -torch.inf)


def kth_largest(values: Tensor, ks: Sequence[int]) -> Tensor:
    """Finds each row's k-th largest value, (num_rows, 1).

    On a CPU by numpy, whose vectorised selection takes a tenth of the time of torch's.
    """
    if values.device.type != "cpu":
        ranks = upload(ks, torch.int64, values.device)[:, None] - 1
        return values.topk(max(ks), dim=-1).values.gather(1, ranks)
    width, array = values.shape[1], values.numpy()
    least = np.empty((len(ks), 1), array.dtype)
    for k in set(ks):
        rows = [row for row, each in enumerate(ks) if each == k]
        part = array if len(rows) == len(ks) else array[rows]
        least[rows, 0] = np.partition(part, width - k, axis=-1)[:, width - k]
    return torch.from_numpy(least)


def _apply_top_p(weights: Tensor, top_ps: dict[int, float]) -> None:
    """Drops all but the smallest set of most likely tokens whose probability reaches p.

    Of equally likely tokens at the edge of the set, those with the lowest ids stay.
    """
    if not top_ps:
        return
    rows = upload(list(top_ps), torch.int64, weights.device)
    chosen = weights[rows]
    goal = _column(list(top_ps.values()), chosen) * chosen.sum(dim=-1, keepdim=True)
    ranked = _ranked(chosen)
    reached_before = ranked.cumsum(dim=-1) - ranked
    num_kept = (reached_before < goal).sum(dim=-1, keepdim=True)
    least = ranked.gather(1, num_kept - 1)
    num_equal = num_kept - (ranked > least).sum(dim=-1, keepdim=True)
    is_equal = chosen == least
    stays = (chosen > least) | (is_equal & (is_equal.cumsum(dim=-1) <= num_equal))
    weights[rows] = chosen.masked_fill_(~stays, 0)


def _apply_typical_p(weights: Tensor, scores: Tensor, typical_ps: dict[int, float]) -> None:
    """Drops all but the tokens whose surprise is closest to the entropy, until they reach p.

    Surprise is the logarithm of a row's sum of exponentials less a token's score, and entropy is
    its mean; so their distance is that of the score from the mean score. Of equally surprising
    tokens at the edge of the set, all stay.

    Args:
        weights: (num_rows, vocab_size); those of dropped tokens become 0.
        scores: (len(typical_ps), vocab_size), what was weighed, of these rows.
        typical_ps: The shares to reach, by row.
    """
    if not typical_ps:
        return
    rows = upload(list(typical_ps), torch.int64, weights.device)
    chosen = weights[rows]
    total = chosen.sum(dim=-1, keepdim=True)
    terms = (chosen / total * scores).nan_to_num_(0.0)  # dropped tokens may have -inf
    mean = (terms * _MEAN_UNIT).round_().sum(dim=-1, keepdim=True) / _MEAN_UNIT
    distance = (scores - mean).abs_()
    order = _order(distance)
    reached = chosen.gather(1, order).cumsum(dim=-1)
    goal = _column(list(typical_ps.values()), chosen) * total
    last = (reached < goal).sum(dim=-1, keepdim=True).clamp_(max=chosen.shape[1] - 1)
    furthest = distance.gather(1, order.gather(1, last))
    weights[rows] = chosen.masked_fill_(distance > furthest, 0)


def _ranked(weights: Tensor) -> Tensor:
    """Sorts each row's weights, greatest first.

    On a CPU by numpy: its vectorised sort takes a twelfth of the time of torch's.
    """
    if weights.device.type == "cpu":
        return torch.from_numpy(np.sort(weights.numpy(), axis=-1)).flip(-1)
    return weights.sort(dim=-1, descending=True).values


def _order(values: Tensor) -> Tensor:
    """Orders each row's columns by value, least first; that of equals does not matter here."""
    if values.device.type == "cpu":
        return torch.from_numpy(np.argsort(values.numpy(), axis=-1))
    return values.argsort(dim=-1)


def _column(values: Sequence[float], like: Tensor) -> Tensor:
    """Makes (num_rows, 1), float64, on the device of another tensor."""
    return upload(values, torch.float64, like.device)[:, None]
