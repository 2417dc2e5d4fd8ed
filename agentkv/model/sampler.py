"""Chooses tokens from logits.

It knows rows of logits and what each asks for; it keeps no state, since every random number is a
function of the branch's stream and the position. A row's token is the same whichever other rows
are in the batch.

    logits -> edits of single tokens (logit_edits) -> the greatest, or a draw (filters, draw)
           -> log-probabilities, of the logits as they came (logprobs)
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from agentkv.core.batch import Sample, Sampled, TopLogprobs
from agentkv.model.draw import draw_tokens
from agentkv.model.logit_edits import edit_logits, has_edits
from agentkv.model.logprobs import logprobs, most_likely, of_tokens
from agentkv.model.random_stream import Draw, uniforms
from agentkv.model.upload import upload

CPU_ELEMENTS_AT_ONCE = 2**20
"""Logits whose float64 copies are made at the same time: 8 MiB for each copy."""
GPU_ELEMENTS_AT_ONCE = 2**24
"""The same on a GPU, where a few large launches are better: 128 MiB for each copy."""
_FAILED = -1
"""Stands for the token of a row that failed."""
_STUCK = -2
"""The same where no token may be chosen."""


class Sampler:
    """Turns logits into tokens; stateless, so one serves all branches."""

    def sample(self, logits: Tensor, samples: Sequence[Sample]) -> list[Sampled]:
        """Chooses one token for each row.

        A greedy row takes the most likely token, of equals the lowest id, and draws nothing. A
        row without a finite greatest logit (NaN or +inf anywhere, or -inf everywhere, also
        because no token is allowed) fails alone.

        Args:
            logits: (num_samples, vocab_size), any floating dtype; not changed.
            samples: What each row asks for, in the order of the rows.
        """
        assert logits.shape[0] == len(samples), "one row of logits for each sample"
        if not samples:
            return []
        raw = logits.float()
        scores = raw
        if any(has_edits(sample) for sample in samples):
            scores = raw.clone()
            edit_logits(scores, samples)
        tokens = _greatest(scores)
        greatest = scores.gather(1, tokens[:, None]).squeeze(1)
        failed = ~greatest.isfinite()
        drawn = [row for row, sample in enumerate(samples) if not sample.params.is_greedy]
        for rows in _chunks(drawn, scores):
            index = upload(rows, torch.int64, scores.device)
            tokens[index] = _draw(scores[index], failed[index], [samples[row] for row in rows])
        answers = tokens.masked_fill(failed, _FAILED).masked_fill(greatest == -torch.inf, _STUCK)
        return _answers(answers, _reports(raw, tokens, samples))

    def token_logprobs(self, logits: Tensor, tokens: Sequence[int]) -> list[float]:
        """Computes the natural logarithm of one given token's probability for each row.

        Args:
            logits: (num_rows, vocab_size), raw; any floating dtype.
            tokens: One token id for each row, in [0, vocab_size).

        Returns:
            (num_rows,) log-softmax; NaN where the logits are not finite.
        """
        assert logits.shape[0] == len(tokens), "one token for each row"
        index = upload(tokens, torch.int64, logits.device)
        parts = [slice(rows[0], rows[-1] + 1) for rows in _chunks(range(len(tokens)), logits)]
        if not parts:
            return []
        found = torch.cat([of_tokens(logprobs(logits[part]), index[part]) for part in parts])
        listed: list[float] = found.tolist()
        return listed


def _greatest(scores: Tensor) -> Tensor:
    """Finds each row's greatest score, (num_rows,): the first of equals, NaN above all.

    On a CPU by numpy, in a tenth of the time that torch takes.
    """
    if scores.device.type == "cpu":
        return torch.from_numpy(scores.numpy().argmax(axis=-1))
    return scores.argmax(dim=-1)


def _draw(scores: Tensor, failed: Tensor, samples: Sequence[Sample]) -> Tensor:
    """Draws a token for each row; what is chosen for a row that failed does not matter."""
    scores.masked_fill_(failed[:, None], -torch.inf)
    scores[:, 0].masked_fill_(failed, 0.0)
    draws = uniforms([Draw(sample.stream, sample.position) for sample in samples])
    numbers = upload(draws.tolist(), torch.float64, scores.device)
    return draw_tokens(scores, [sample.params for sample in samples], numbers)


class _Reports:
    """Log-probabilities that some rows asked for."""

    def __init__(self) -> None:
        self.chosen: list[Tensor] = []
        self.top: dict[int, TopLogprobs] = {}
        self.rows: list[int] = []


def _reports(logits: Tensor, tokens: Tensor, samples: Sequence[Sample]) -> _Reports:
    reports = _Reports()
    asking = [row for row, sample in enumerate(samples) if sample.params.logprobs]
    for rows in _chunks(asking, logits):
        index = upload(rows, torch.int64, logits.device)
        found = logprobs(logits if len(rows) == len(samples) else logits[index])
        reports.rows += rows
        reports.chosen.append(of_tokens(found, tokens[index]))
        tops = [place for place, row in enumerate(rows) if samples[row].params.top_logprobs]
        if tops:
            some = found[upload(tops, torch.int64, logits.device)]
            counts = [samples[rows[place]].params.top_logprobs for place in tops]
            named = (rows[place] for place in tops)
            reports.top.update(zip(named, most_likely(some, counts), strict=True))
    return reports


def _answers(tokens: Tensor, reports: _Reports) -> list[Sampled]:
    """Fetches what was chosen, in one transfer, and puts it together."""
    values: dict[int, float] = {}
    if reports.rows:
        # Any token is exact in float64, so all fit one tensor.
        parts = [tokens.double(), *(part.double() for part in reports.chosen)]
        fetched = torch.cat(parts).tolist()
        listed = [int(token) for token in fetched[: len(tokens)]]
        values = dict(zip(reports.rows, fetched[len(tokens) :], strict=True))
    else:
        listed = tokens.tolist()
    return [
        Sampled(_FAILED, None, failed=True, is_stuck=token == _STUCK)
        if token in (_FAILED, _STUCK)
        else Sampled(token, values.get(row), top=reports.top.get(row))
        for row, token in enumerate(listed)
    ]


def _chunks(rows: Sequence[int], logits: Tensor) -> Iterator[list[int]]:
    """Splits rows so that each part's float64 copies are of a good size for the device."""
    on_cpu = logits.device.type == "cpu"
    limit = CPU_ELEMENTS_AT_ONCE if on_cpu else GPU_ELEMENTS_AT_ONCE
    size = max(1, limit // logits.shape[1])
    for start in range(0, len(rows), size):
        yield list(rows[start : start + size])
