"""Chooses tokens from logits.

It knows rows of logits and what each asks for; it keeps no state, since every random number is a
function of the branch's stream and the position. A row's token is the same whichever other rows
are in the batch. For that, probabilities are summed as integers: sums of floating-point numbers
depend on how a kernel splits the work, and so on the shape of the batch.

    logits -> / temperature -> top-k -> top-p -> min-p -> weights -> first token whose running
    sum of weights exceeds u * total

Order and meaning of the filters are those of transformers' logits processors.
"""

from collections.abc import Iterator, Sequence
from math import isnan

import numpy as np
import torch
from torch import Tensor

from agentkv.core.batch import Sample, Sampled
from agentkv.model.random_stream import Draw, uniforms
from agentkv.model.token_mask import keep_allowed
from agentkv.model.upload import upload
from agentkv.sampling_params import SamplingParams

CPU_ELEMENTS_AT_ONCE = 2**17
"""Logits whose float64 copies are made at the same time: those copies stay in the cache."""
GPU_ELEMENTS_AT_ONCE = 2**24
"""The same on a GPU, where a few large launches are better: 128 MiB for each copy."""
_FAILED = -1
"""Stands for the token of a row that failed."""


class Sampler:
    """Turns logits into tokens; stateless, so one serves all branches."""

    def sample(self, logits: Tensor, samples: Sequence[Sample]) -> list[Sampled]:
        """Chooses one token for each row.

        A greedy row takes the most likely token, of equals the lowest id, and draws nothing. A
        row without a finite greatest logit (NaN or +inf anywhere, or -inf everywhere) fails alone.

        Args:
            logits: (num_samples, vocab_size), any floating dtype; not changed.
            samples: What each row asks for, in the order of the rows.
        """
        assert logits.shape[0] == len(samples), "one row of logits for each sample"
        if not samples:
            return []
        choices = keep_allowed(logits, samples)
        tokens = choices.argmax(dim=-1)  # (num_samples,); the first of equals, NaN above all
        failed = ~choices.gather(1, tokens[:, None]).squeeze(1).isfinite()
        drawn = [row for row, sample in enumerate(samples) if not sample.params.is_greedy]
        for rows in _chunks(drawn, logits):
            index = upload(rows, torch.int64, logits.device)
            chosen = _draw(choices[index], failed[index], [samples[row] for row in rows])
            tokens[index] = chosen
        asking = [row for row, sample in enumerate(samples) if sample.params.logprobs]
        return _answers(tokens.masked_fill(failed, _FAILED), _logprobs_at(logits, tokens, asking))

    def token_logprobs(self, logits: Tensor, tokens: Sequence[int]) -> list[float]:
        """Computes the natural logarithm of one given token's probability for each row.

        Args:
            logits: (num_rows, vocab_size), raw; any floating dtype.
            tokens: One token id for each row, in [0, vocab_size).

        Returns:
            (num_rows,) log-softmax in float64; NaN where the logits are not finite.
        """
        assert logits.shape[0] == len(tokens), "one token for each row"
        index = upload(tokens, torch.int64, logits.device)
        parts = [slice(rows[0], rows[-1] + 1) for rows in _chunks(range(len(tokens)), logits)]
        if not parts:
            return []
        found = torch.cat([_logprobs(logits[part], index[part]) for part in parts])
        listed: list[float] = found.tolist()
        return listed


def _answers(tokens: Tensor, logprobs: Tensor | None) -> list[Sampled]:
    """Fetches what was chosen, in one transfer: the only time a step waits for its device."""
    if logprobs is None:
        pairs = ((token, None) for token in tokens.tolist())
    else:
        # Any token is exact in float64, so both fit one tensor.
        fetched = torch.stack((tokens.double(), logprobs), dim=1).tolist()
        pairs = ((int(token), None if isnan(value) else value) for token, value in fetched)
    return [
        Sampled(-1, None, failed=True) if token == _FAILED else Sampled(token, logprob)
        for token, logprob in pairs
    ]


def _logprobs_at(logits: Tensor, tokens: Tensor, rows: Sequence[int]) -> Tensor | None:
    """Computes some rows' log-probabilities of their tokens, NaN for the others; None for none.

    A row that asks has NaN only when it failed.
    """
    if not rows:
        return None
    found = torch.full(tokens.shape, torch.nan, dtype=torch.float64, device=logits.device)
    for part in _chunks(rows, logits):
        index = upload(part, torch.int64, logits.device)
        found[index] = _logprobs(logits[index], tokens[index])
    return found


def _logprobs(logits: Tensor, tokens: Tensor) -> Tensor:
    return logits.double().log_softmax(dim=-1).gather(1, tokens[:, None]).squeeze(1)


def _draw(logits: Tensor, failed: Tensor, samples: Sequence[Sample]) -> Tensor:
    """Draws a token for each row by inverting its distribution at the row's random number.

    Args:
        logits: (num_rows, vocab_size).
        failed: (num_rows,); what is chosen for these rows does not matter.
        samples: What each row asks for; none of them greedy.

    Returns:
        (num_rows,) token ids, int64.
    """
    params = [sample.params for sample in samples]
    draws = uniforms([Draw(sample.stream, sample.position) for sample in samples])
    numbers = upload(draws.tolist(), torch.float64, logits.device)
    scores = logits.double().masked_fill_(failed[:, None], 0.0)
    # The greatest score becomes 0 before it is divided: no temperature can make it overflow.
    scores -= scores.amax(dim=-1, keepdim=True)
    scores /= _column([each.temperature for each in params], scores)
    running = filtered_weights(scores, params).cumsum(dim=-1)
    total = running[:, -1]
    target = torch.minimum((numbers * total).long(), total - 1)
    return torch.searchsorted(running, target[:, None], right=True).squeeze(1)


def filtered_weights(scores: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Gives every token its share of the probability that the filters leave, as an integer.

    Weights are proportional to probabilities to within one unit; the most likely token has
    2**62 / vocab_size or a little less, so that a row's sum fits in 63 bits.

    Args:
        scores: (num_rows, vocab_size), float64, divided by the temperature, at most 0, the
            greatest of each row exactly 0; overwritten.
        params: The filters of each row.

    Returns:
        (num_rows, vocab_size), int64; at least one positive weight in every row.
    """
    vocab_size = scores.shape[1]
    top_ks = {
        row: each.top_k
        for row, each in enumerate(params)
        if each.top_k is not None and each.top_k < vocab_size
    }
    if top_ks:
        _apply_top_k(scores, top_ks)
    shares = scores.exp_()  # of the most likely token's probability
    weights = (shares * 2.0 ** (62 - vocab_size.bit_length())).long()
    top_ps = {row: each.top_p for row, each in enumerate(params) if (each.top_p or 1.0) < 1.0}
    if top_ps:
        _apply_top_p(weights, {row: p for row, p in top_ps.items() if p is not None})
    if any(each.min_p for each in params):
        weights.masked_fill_(shares < _column([each.min_p or 0.0 for each in params], shares), 0)
    return weights


def _apply_top_k(scores: Tensor, top_ks: dict[int, int]) -> None:
    """Drops what is less likely than a row's k-th token; those equal to it stay."""
    rows = upload(list(top_ks), torch.int64, scores.device)
    ranks = upload(list(top_ks.values()), torch.int64, scores.device)[:, None] - 1
    chosen = scores[rows]
    least = chosen.topk(max(top_ks.values()), dim=-1).values.gather(1, ranks)
    scores[rows] = chosen.masked_fill_(chosen < least, -torch.inf)


def _apply_top_p(weights: Tensor, top_ps: dict[int, float]) -> None:
    """Drops all but the smallest set of most likely tokens whose probability reaches p.

    Of equally likely tokens at the edge of the set, those with the lowest ids stay.
    """
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


def _ranked(weights: Tensor) -> Tensor:
    """Sorts each row's weights, greatest first.

    On a CPU by numpy: its vectorised sort takes a twelfth of the time of torch's.
    """
    if weights.device.type == "cpu":
        return torch.from_numpy(np.sort(weights.numpy(), axis=-1)).flip(-1)
    return weights.sort(dim=-1, descending=True).values


def _column(values: Sequence[float], like: Tensor) -> Tensor:
    """Makes (num_rows, 1), float64, on the device of another tensor."""
    return upload(values, torch.float64, like.device)[:, None]


def _chunks(rows: Sequence[int], logits: Tensor) -> Iterator[list[int]]:
    """Splits rows so that each part's float64 copies are of a good size for the device."""
    on_cpu = logits.device.type == "cpu"
    limit = CPU_ELEMENTS_AT_ONCE if on_cpu else GPU_ELEMENTS_AT_ONCE
    size = max(1, limit // logits.shape[1])
    for start in range(0, len(rows), size):
        yield list(rows[start : start + size])
