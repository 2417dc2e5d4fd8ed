"""Makes requests: numbers them, gives them their random stream and the ids that end them.

It puts given tokens on a context's tail, where the scheduler expects them; it submits nothing.
"""

from collections.abc import Callable, Sequence
from itertools import count

from agentkv.core.batch import Stream
from agentkv.core.context import Context
from agentkv.core.context_tree import ContextTree
from agentkv.core.matcher import Matcher
from agentkv.core.request import Request
from agentkv.sampling_params import SamplingParams


class RequestFactory:
    """Requests of one engine, in order of arrival."""

    def __init__(
        self,
        tree: ContextTree,
        end_token_ids: frozenset[int],
        new_seed: Callable[[], int],
    ) -> None:
        self._tree = tree
        self._end_token_ids = end_token_ids
        self._new_seed = new_seed
        self._ids = count(1)

    def completion(self, context: Context) -> Request:
        """Asks for the KV of what lies on a context's tail already."""
        return Request(next(self._ids), context)

    def extension(
        self, context: Context, token_ids: Sequence[int], *, with_logprobs: bool
    ) -> Request:
        """Puts given tokens on an idle context's tail, not yet committed, and asks for their KV."""
        request = self.completion(context)
        if with_logprobs:
            request.next_scored = max(context.length, 1)  # nothing precedes the very first
            request.head = self._tree.heads.get(context.tail)
        context.tail = self._tree.append(context.tail, token_ids, context.hold)
        return request

    def scoring(self, branch: Context, token_ids: Sequence[int]) -> Request:
        """Asks for the log-probabilities of tokens that nothing will follow."""
        request = self.extension(branch, token_ids, with_logprobs=True)
        request.is_continued = False
        return request

    def generation(
        self,
        context: Context,
        params: SamplingParams,
        seed: int | None,
        matcher: Matcher | None = None,
    ) -> Request:
        """Asks for tokens to be sampled after a context's last one."""
        model_ends = frozenset[int]() if params.ignore_eos else self._end_token_ids
        ends = model_ends.union(params.stop_token_ids)
        stream = Stream(seed or 0, context.ordinal)
        return Request(next(self._ids), context, params, stream, ends, matcher)

    def seed(self, params: SamplingParams) -> int | None:
        """Finds the seed that replays a call: the caller's, or a fresh one; None when greedy."""
        if params.is_greedy:
            return None
        return self._new_seed() if params.seed is None else params.seed
