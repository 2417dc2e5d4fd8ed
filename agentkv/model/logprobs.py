"""Log-probabilities of chosen, given and most likely tokens, from logits as the model gave them.

Natural logarithms, computed in float32: to about 1e-5 of what float64 would give. A row's values
do not depend on the other rows. A token's is its logit less its row's normaliser.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from agentkv.core.batch import TopLogprobs
from agentkv.model.row_chunks import row_chunks
from agentkv_kernels.drawing import Drawing, MostLikely


def normalisers(logits: Tensor, drawing: Drawing | None = None) -> Tensor:
    """Computes the logarithm of each row's sum of exponentials, (num_rows,), float32.

    Args:
        logits: (num_rows, vocab_size), float32.
        drawing: The native kernels, for logits on a CPU.
    """
    if drawing is not None:
        return drawing.normalisers(logits)
    # By log-softmax, which on a CPU takes half the time of logsumexp.
    parts = [logits[rows[0] : rows[-1] + 1] for rows in row_chunks(range(logits.shape[0]), logits)]
    found = [part.amax(dim=-1) - part.log_softmax(dim=-1).amax(dim=-1) for part in parts]
    return torch.cat(found) if found else logits.new_empty(0)


def of_tokens(logits: Tensor, normalisers: Tensor, tokens: Tensor) -> Tensor:
    """Picks one token's log-probability in each row, (num_rows,)."""
    return logits.gather(1, tokens[:, None]).squeeze(1) - normalisers


def most_likely(
    logits: Tensor, normalisers: Tensor, counts: Sequence[int], drawing: Drawing | None = None
) -> list[TopLogprobs]:
    """Lists each row's most likely tokens, greatest first, of equals the lowest id first.

    Args:
        logits: (num_rows, vocab_size), float32.
        normalisers: (num_rows,), of the logits.
        counts: How many tokens for each row, at least 1; a row may have fewer possible ones.
        drawing: The native kernels, for logits on a CPU.
    """
    sizes = [min(count, logits.shape[1]) for count in counts]
    find = by_torch if drawing is None else drawing.most_likely
    most = find(logits, sizes)
    token_ids, values = most.token_ids.tolist(), (most.logits - normalisers[:, None]).tolist()
    return [
        TopLogprobs(*_possible(ids[:size], row[:size]))
        for ids, row, size in zip(token_ids, values, sizes, strict=True)
    ]


def by_torch(logits: Tensor, counts: Sequence[int]) -> MostLikely:
    """Says in torch what `Drawing.most_likely` finds.

    The order of floats is that of their bits as whole numbers, but for negative ones, which run
    backwards. With the id below them, no two tokens of a row are equal.
    """
    bits = (logits + 0.0).view(torch.int32)  # + 0.0: no zero is negative
    places = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long() << 32
    ids = torch.arange(logits.shape[1], device=logits.device)
    token_ids = (places - ids).topk(max(counts), dim=-1).indices
    return MostLikely(token_ids, logits.gather(1, token_ids))


def _possible(
    token_ids: Sequence[int], values: Sequence[float]
) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """Drops tokens of no probability."""
    kept = [pair for pair in zip(token_ids, values, strict=True) if pair[1] > -torch.inf]
    return tuple(token for token, _ in kept), tuple(value for _, value in kept)
