"""Makes requests: numbers them, gives them their random stream and the ids that end them.

It puts given tokens on a context's tail, where the scheduler expects them; it submits nothing.
"""

from collections.abc import Callable, Sequence
from itertools import count

from agentkv.core.batch import Stream
from agentkv.core.context import Context
from agentkv.core.context_tree import ContextTree
from agentkv.core.drafter import Drafter
from agentkv.core.request import Request
from agentkv.core.token_counter import TokenCounter
from agentkv.core.token_rules import TokenRules
from agentkv.sampling_params import SamplingParams


class RequestFactory:
    """Requests of one engine, in order of arrival."""

    def __init__(
        self,
        tree: ContextTree,
        end_token_ids: frozenset[int],
        new_seed: Callable[[], int],
        vocab_size: int,
        num_speculative_tokens: int = 0,
    ) -> None:
        self._tree = tree
        self._end_token_ids = end_token_ids
        self._new_seed = new_seed
        self._vocab_size = vocab_size
        self._num_speculative_tokens = num_speculative_tokens
        self._ids = count(1)

    def completion(self, context: Context, *, with_logprobs: bool = False) -> Request:
        """Asks for the KV of what lies on a new context's tail already.

        With log-probabilities, tokens that a cached prefix has are run again, without a write.
        """
        request = Request(next(self._ids), context)
        if with_logprobs:
            request.next_scored = 1  # nothing precedes the very first
        return request

    def extension(
        self, context: Context, token_ids: Sequence[int], *, with_logprobs: bool
    ) -> Request:
        """Puts given tokens on an idle context's tail, not yet committed, and asks for their KV."""
        request = Request(next(self._ids), context)
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

    def generations(
        self, contexts: Sequence[Context], params: SamplingParams, seed: int | None
    ) -> list[Request]:
        """Asks for tokens to be sampled after the last one of contexts that hold equal tokens."""
        ends = self.ends(params)
        rules = TokenRules.of(params, self._vocab_size)
        early = TokenRules.banning(rules, ends) if params.min_tokens and ends else rules
        counter = self._counter(contexts[0], params)
        return [
            Request(
                next(self._ids),
                context,
                params,
                Stream(seed or 0, context.ordinal),
                ends,
                rules=rules,
                early_rules=early,
                counter=None if counter is None else counter.fork(),
                drafter=self._drafter(params),
            )
            for context in contexts
        ]

    def ends(self, params: SamplingParams) -> frozenset[int]:
        """Collects the ids that end a generation."""
        model_ends = frozenset[int]() if params.ignore_eos else self._end_token_ids
        return model_ends.union(params.stop_token_ids)

    def seed(self, params: SamplingParams) -> int | None:
        """Finds the seed that replays a call: the caller's, or a fresh one; None when greedy."""
        if params.is_greedy:
            return None
        return self._new_seed() if params.seed is None else params.seed

    def _drafter(self, params: SamplingParams) -> Drafter | None:
        asked = params.num_speculative_tokens
        max_tokens = self._num_speculative_tokens if asked is None else asked
        return Drafter(max_tokens) if max_tokens else None

    def _counter(self, context: Context, params: SamplingParams) -> TokenCounter | None:
        """Counts what penalties count before the first token: nothing, or the whole context."""
        if not params.has_penalties:
            return None
        return TokenCounter(self._tree.tokens(context.tail) if params.penalize_prompt else ())
