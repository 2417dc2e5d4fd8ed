"""The best of many completions, by what the model itself thinks of them."""

from collections.abc import Sequence

from agentkv.client.completion import Completion, GeneratedBranch, HandleT
from agentkv.errors import InvalidRequest


def best_of(
    branches: Sequence[GeneratedBranch[HandleT]], *, by_mean: bool = False
) -> GeneratedBranch[HandleT]:
    """Picks the branch whose generated tokens are most likely together; of equals the first.

    Args:
        branches: What `complete_branches` returned, generated with `logprobs`; failed ones are
            passed over.
        by_mean: Whether to compare log-probabilities per token, which is fair to long ones.

    Raises:
        InvalidRequest: No branch has log-probabilities.
    """

    def value(completion: Completion) -> float:
        total = completion.total_logprob
        return total / len(completion.logprobs) if by_mean else total

    able = [b for b in branches if b.completion.error is None and b.completion.logprobs]
    if not able:
        raise InvalidRequest("No branch has log-probabilities; generate with logprobs=True.")
    return max(able, key=lambda branch: value(branch.completion))
