"""Log-probabilities of chosen, given and most likely tokens, from logits as the model gave them.

Natural logarithms, computed in float32: to about 1e-5 of what float64 would give. A row's values
do not depend on the other rows. A token's is its logit less its row's normaliser.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from agentkv.core.batch import TopLogprobs
from agentkv.model.candidates import candidates
from agentkv.model.row_chunks import row_chunks


def normalisers(logits: Tensor) -> Tensor:
    """Computes the logarithm of each row's sum of exponentials, (num_rows,), float32.

    By log-softmax, which on a CPU takes half the time of logsumexp.

    Args:
        logits: (num_rows, vocab_size), float32.
    """
    parts = [logits[rows[0] : rows[-1] + 1] for rows in row_chunks(range(logits.shape[0]), logits)]
    found = [part.amax(dim=-1) - part.log_softmax(dim=-1).amax(dim=-1) for part in parts]
    return torch.cat(found) if found else logits.new_empty(0)


def of_tokens(logits: Tensor, normalisers: Tensor, tokens: Tensor) -> Tensor:
    """Picks one token's log-probability in each row, (num_rows,)."""
    return logits.gather(1, tokens[:, None]).squeeze(1) - normalisers


def most_likely(logits: Tensor, normalisers: Tensor, counts: Sequence[int]) -> list[TopLogprobs]:
    """Lists each row's most likely tokens, greatest first, of equals the lowest id first.

    Args:
        logits: (num_rows, vocab_size), float32.
        normalisers: (num_rows,), of the logits.
        counts: How many tokens for each row, at least 1; a row may have fewer possible ones.
    """
    vocab_size = logits.shape[1]
    sizes = [min(count, vocab_size) for count in counts]
    if logits.device.type == "cpu":
        some = candidates(logits, sizes)
        order = np.argsort(-some.scores.numpy(), axis=-1, kind="stable")[:, : max(sizes)]
        token_ids = np.take_along_axis(some.token_ids.numpy(), order, axis=-1).tolist()
        scores = torch.from_numpy(np.take_along_axis(some.scores.numpy(), order, axis=-1))
        values = (scores - normalisers[:, None]).tolist()
    else:
        top = logits.topk(max(sizes), dim=-1)
        token_ids, values = top.indices.tolist(), (top.values - normalisers[:, None]).tolist()
    return [
        TopLogprobs(*_possible(ids[:size], row[:size]))
        for ids, row, size in zip(token_ids, values, sizes, strict=True)
    ]


def _possible(
    token_ids: Sequence[int], values: Sequence[float]
) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """Drops tokens of no probability."""
    kept = [pair for pair in zip(token_ids, values, strict=True) if pair[1] > -torch.inf]
    return tuple(token for token, _ in kept), tuple(value for _, value in kept)
