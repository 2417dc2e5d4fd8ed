"""Chooses tokens from logits.

It knows rows of logits and what each asks for; it remembers nothing, since every random number is a
function of the branch's stream and the position. A row's token is the same whichever other rows
are in the batch. On a CPU native kernels choose (`agentkv_kernels.drawing`), else torch.

    logits -> edits of single tokens (logit_edits) -> the greatest, or a draw (filters, draw)
           -> log-probabilities, of the logits as they came (logprobs)
"""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from agentkv.core.batch import Sample, Sampled, TopLogprobs
from agentkv.model.draw import draw_tokens
from agentkv.model.logit_edits import edit_logits, has_edits
from agentkv.model.logprobs import most_likely, normalisers, of_tokens
from agentkv.model.random_stream import Draw, uniforms
from agentkv.model.upload import upload
from agentkv.sampling_params import SamplingParams
from agentkv_kernels.drawing import Choice, Chosen, Drawing
from agentkv_kernels.native import NativeLibrary

_NO_TOKEN = -1
"""Stands for the token of a row that failed."""


class Sampler:
    """Turns logits into tokens; one serves all branches, one call at a time."""

    def __init__(self, native: NativeLibrary | None = None) -> None:
        """Takes the kernels, or None for torch alone."""
        self._drawing = None if native is None else Drawing(native)

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
        drawing, raw = self._drawing_for(logits), _in_float32(logits)
        scores = raw
        if any(has_edits(sample) for sample in samples):
            scores = raw.clone(memory_format=torch.contiguous_format)
            edit_logits(scores, samples, drawing)
        chosen = choose(scores, samples) if drawing is None else _by(drawing, scores, samples)
        return _answers(chosen, _reports(raw, chosen.tokens, samples, drawing))

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
        drawing, raw = self._drawing_for(logits), _in_float32(logits)
        listed: list[float] = of_tokens(raw, normalisers(raw, drawing), index).tolist()
        return listed

    def _drawing_for(self, logits: Tensor) -> Drawing | None:
        return self._drawing if logits.is_cpu else None


def _in_float32(logits: Tensor) -> Tensor:
    """Returns logits with dense rows."""
    raw = logits.float()
    return raw if raw.stride(-1) == 1 else raw.contiguous()


def _by(drawing: Drawing, scores: Tensor, samples: Sequence[Sample]) -> Chosen:
    """Chooses by the native kernels."""
    numbers = iter(_numbers([each for each in samples if not each.params.is_greedy]))
    return drawing.choose(scores, [_choice(each.params, numbers) for each in samples])


def _choice(params: SamplingParams, numbers: Iterator[float]) -> Choice:
    """Says what a row asks for; takes a number unless it is greedy."""
    if params.is_greedy:
        return Choice()
    return Choice(
        number=next(numbers),
        temperature=params.temperature,
        top_k=params.top_k or 0,
        top_p=params.top_p or 1.0,
        min_p=params.min_p or 0.0,
        typical_p=params.typical_p or 1.0,
    )


def choose(scores: Tensor, samples: Sequence[Sample]) -> Chosen:
    """Says in torch what `Drawing.choose` does."""
    tokens = _greatest(scores)
    greatest = scores.gather(1, tokens[:, None]).squeeze(1)
    drawn = [row for row, sample in enumerate(samples) if not sample.params.is_greedy]
    if drawn:
        index = upload(drawn, torch.int64, scores.device)
        failed = ~greatest[index].isfinite()
        # What is chosen for a row that failed does not matter; here it is token 0.
        picked = scores[index].masked_fill_(failed[:, None], -torch.inf)
        picked[:, 0].masked_fill_(failed, 0.0)
        numbers = upload(_numbers([samples[row] for row in drawn]), torch.float64, scores.device)
        tokens[index] = draw_tokens(picked, [samples[row].params for row in drawn], numbers)
    return Chosen(tokens, greatest)


def _greatest(scores: Tensor) -> Tensor:
    """Finds each row's greatest score, (num_rows,): the first of equals, NaN above all.

    On a CPU by numpy, in a tenth of the time that torch takes.
    """
    if scores.device.type == "cpu":
        return torch.from_numpy(scores.numpy().argmax(axis=-1))
    return scores.argmax(dim=-1)


def _numbers(samples: Sequence[Sample]) -> list[float]:
    """Draws a random number for each row."""
    if not samples:
        return []
    draws = [Draw(sample.stream, sample.position) for sample in samples]
    listed: list[float] = uniforms(draws).tolist()
    return listed


class _Reports(NamedTuple):
    """Log-probabilities that some rows asked for."""

    rows: list[int]
    chosen: Tensor
    """Of the chosen tokens, one for each of `rows`."""
    top: dict[int, TopLogprobs]
    """By row."""


def _reports(
    logits: Tensor, tokens: Tensor, samples: Sequence[Sample], drawing: Drawing | None
) -> _Reports | None:
    """Finds the log-probabilities that rows ask for; None when none does."""
    rows = [row for row, sample in enumerate(samples) if sample.params.logprobs]
    if not rows:
        return None
    index = upload(rows, torch.int64, logits.device)
    asked = logits if len(rows) == len(samples) else logits[index]
    sums = normalisers(asked, drawing)
    chosen = of_tokens(asked, sums, tokens[index])
    places = [place for place, row in enumerate(rows) if samples[row].params.top_logprobs]
    if not places:
        return _Reports(rows, chosen, {})
    some = upload(places, torch.int64, logits.device)
    counts = [samples[rows[place]].params.top_logprobs for place in places]
    picked = asked if len(places) == len(rows) else asked[some]
    found = most_likely(picked, sums[some], counts, drawing)
    named = (rows[place] for place in places)
    return _Reports(rows, chosen, dict(zip(named, found, strict=True)))


def _answers(chosen: Chosen, reports: _Reports | None) -> list[Sampled]:
    """Fetches what was chosen, in one transfer, and puts it together."""
    num_rows = len(chosen.tokens)
    parts = [chosen.tokens, chosen.greatest] + ([] if reports is None else [reports.chosen])
    fetched = torch.cat([part.double() for part in parts]).tolist()  # where any token is exact
    rows, tops = ([], {}) if reports is None else (reports.rows, reports.top)
    values = dict(zip(rows, fetched[2 * num_rows :], strict=True))
    return [
        Sampled(int(token), values.get(row), top=tops.get(row))
        if math.isfinite(greatest)
        else Sampled(_NO_TOKEN, None, failed=True, is_stuck=greatest == -math.inf)
        for row, (token, greatest) in enumerate(
            zip(fetched[:num_rows], fetched[num_rows : 2 * num_rows], strict=True)
        )
    ]
