"""Log-probabilities of chosen, given and most likely tokens, from logits as the model gave them.

Natural logarithms, computed in float32: to about 1e-5 of what float64 would give. A row's values
do not depend on the other rows.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from agentkv.core.batch import TopLogprobs
from agentkv.model.candidates import candidates


def logprobs(logits: Tensor) -> Tensor:
    """Computes the log-probability of every token, (num_rows, vocab_size), float32."""
    return logits.float().log_softmax(dim=-1)


def of_tokens(found: Tensor, tokens: Tensor) -> Tensor:
    """Picks one token's log-probability in each row, (num_rows,)."""
    return found.gather(1, tokens[:, None]).squeeze(1)


def most_likely(found: Tensor, counts: Sequence[int]) -> list[TopLogprobs]:
    """Lists each row's most likely tokens, greatest first, of equals the lowest id first.

    Args:
        found: (num_rows, vocab_size), log-probabilities.
        counts: How many tokens for each row, at least 1; a row may have fewer possible ones.
    """
    vocab_size = found.shape[1]
    sizes = [min(count, vocab_size) for count in counts]
    if found.device.type == "cpu":
        some = candidates(found, sizes)
        order = np.argsort(-some.scores.numpy(), axis=-1, kind="stable")[:, : max(sizes)]
        token_ids = np.take_along_axis(some.token_ids.numpy(), order, axis=-1).tolist()
        values = np.take_along_axis(some.scores.numpy(), order, axis=-1).tolist()
    else:
        top = found.topk(max(sizes), dim=-1)
        token_ids, values = top.indices.tolist(), top.values.tolist()
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
