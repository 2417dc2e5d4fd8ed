"""Draws tokens from edited logits by inverting each row's distribution at its random number.

    scores -> / temperature -> filters -> whole weights -> first token whose running sum of
    weights exceeds u * total

On a CPU a row with filters is drawn from candidates, when those provably hold all that the filters
leave; the token is the one that the whole row would give. It knows no batch and no requests.
"""

import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from agentkv.model.candidates import candidates
from agentkv.model.filters import filtered_weights, weigh, weight_unit
from agentkv.model.row_chunks import row_chunks
from agentkv.model.upload import upload
from agentkv.sampling_params import SamplingParams

NUM_CANDIDATES = (1024, 8192)
"""Candidates of a row that does not say how many tokens stay, and how many if those do not do."""
MAX_TOP_K = NUM_CANDIDATES[-1]
"""A row that keeps more tokens than this is drawn as a whole."""
_MARGIN = 1.001
"""How much further down than min-p candidates reach: float32 and float64 round differently."""
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
    tokens = torch.empty(len(params), dtype=torch.int64, device=scores.device)
    wide = list(range(len(params)))
    for num_candidates in NUM_CANDIDATES if scores.device.type == "cpu" else ():
        narrow = [row for row in wide if _can_narrow(params[row])]
        if not narrow:
            break
        chosen, is_exact = _draw_narrow(*_select(scores, params, numbers, narrow), num_candidates)
        tokens[narrow] = chosen
        wide = sorted(set(wide).difference(itertools.compress(narrow, is_exact)))
    for rows in row_chunks(wide, scores):
        index = upload(rows, torch.int64, scores.device)
        tokens[index] = _draw_wide(*_select(scores, params, numbers, rows))
    return tokens


def _can_narrow(params: SamplingParams) -> bool:
    """Whether filters leave few tokens; typical-p alone may leave any."""
    if params.top_k is not None:
        return params.top_k <= MAX_TOP_K
    return (params.top_p or 1.0) < 1.0 or bool(params.min_p)


def _select(
    scores: Tensor, params: Sequence[SamplingParams], numbers: Tensor, rows: Sequence[int]
) -> tuple[Tensor, list[SamplingParams], Tensor]:
    if len(rows) == len(params):
        return scores, list(params), numbers
    index = upload(rows, torch.int64, scores.device)
    return scores[index], [params[row] for row in rows], numbers[index]


def _draw_wide(scores: Tensor, params: Sequence[SamplingParams], numbers: Tensor) -> Tensor:
    cooled = _cooled(scores, scores.amax(dim=-1, keepdim=True), params)
    return invert(filtered_weights(cooled, params), numbers)


def _draw_narrow(
    scores: Tensor, params: Sequence[SamplingParams], numbers: Tensor, num_candidates: int
) -> tuple[Tensor, list[bool]]:
    """Draws from candidates; says for each row whether they hold all that its filters leave."""
    vocab_size = scores.shape[1]
    greatest = scores.amax(dim=-1, keepdim=True)
    counts = [each.top_k or num_candidates for each in params]
    found = candidates(scores, counts, _floors(greatest, params))
    totals = _totals(scores, greatest, params)
    weights = weigh(_cooled(found.scores, greatest, params), vocab_size)
    held = weights.sum(dim=-1)
    least = weigh(_cooled(found.least[:, None], greatest, params), vocab_size).squeeze(1)
    top_ps = torch.tensor([each.top_p or 1.0 for each in params], dtype=torch.float64)
    min_ps = torch.tensor([each.min_p or 0.0 for each in params], dtype=torch.float64)
    has_top_k = torch.tensor([each.top_k is not None for each in params])
    reaches = (top_ps < 1.0) & (held >= top_ps * totals.squeeze(1))
    is_exact = has_top_k | reaches | (least < min_ps * weight_unit(vocab_size))
    cooled = _cooled(found.scores, greatest, params)
    left = filtered_weights(cooled, params, vocab_size=vocab_size, totals=totals)
    chosen = found.token_ids.gather(1, invert(left, numbers)[:, None]).squeeze(1)
    return chosen, is_exact.tolist()


def _totals(scores: Tensor, greatest: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Sums the weights of the whole vocabulary where top-p needs it, (num_rows, 1); else 0."""
    totals = torch.zeros(len(params), 1, dtype=torch.float64)
    rows = [
        row for row, each in enumerate(params) if each.top_k is None and (each.top_p or 1.0) < 1.0
    ]
    for part in row_chunks(rows, scores):
        some, picked, _ = _select(scores, params, totals, part)
        cooled = _cooled(some, greatest[part], picked)
        totals[part] = weigh(cooled, scores.shape[1]).sum(dim=-1, keepdim=True)
    return totals


def _floors(greatest: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Finds scores, (num_rows, 1), below which min-p drops every token, with some margin.

    Where top-k comes first, or there is no min-p, that is -inf.
    """
    logs = [
        math.log(each.min_p) * each.temperature if each.min_p and each.top_k is None else -math.inf
        for each in params
    ]
    floors = (
        greatest.double() + torch.tensor(logs, dtype=torch.float64)[:, None] * _MARGIN - _MARGIN
    )
    return floors.float()


def _cooled(scores: Tensor, greatest: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Divides by the temperature, in float64.

    The greatest score becomes 0 before it is divided: no temperature can make it overflow.
    """
    temperatures = upload([each.temperature for each in params], torch.float64, scores.device)
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
