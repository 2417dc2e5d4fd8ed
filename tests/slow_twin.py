"""The slow twin: plain transformers on a context's own tokens, and an engine compared with it.

`PlainModel` recomputes everything, without cache, blocks or branches. `TwinBench` runs verbs on an
engine, keeps each context's tokens as a plain list, and compares every token and log-probability
that the engine gives with the plain model's.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from tiny_engines import TinyEngine
from tiny_models import build_tiny_model
from torch import Tensor
from transformers import PreTrainedModel

from agentkv.client.completion import TopLogprobs as ClientTopLogprobs
from agentkv.core.batch import TopLogprobs
from agentkv.core.request import Request
from agentkv.core.token_counter import TokenCounter
from agentkv.engine.operations import Commit, Generation, Operation, Scoring
from agentkv.engine.outputs import Branches, Chunk, Finish, Update
from agentkv.errors import NotFound, PoolExhausted, Reason
from agentkv.sampling_params import SamplingParams

TENANT = "tenant"
TOLERANCE = 1e-4
CLEAR_GAP = 1e-3
"""Logits of the two likeliest tokens closer than this are a near tie: either may be taken."""


class PlainModel:
    """A model with its own attention, run on whole sequences."""

    def __init__(self, model: PreTrainedModel) -> None:
        model.set_attn_implementation("eager")
        self._model = model

    @classmethod
    def of(cls, family: str) -> "PlainModel":
        """The tiny model of a family, its weights equal to any other of that family."""
        return cls(build_tiny_model(family))

    def logits(self, tokens: Sequence[int]) -> Tensor:
        """Logits after each token, (len(tokens), vocab_size)."""
        with torch.inference_mode():
            logits: Tensor = self._model(torch.tensor([list(tokens)]), use_cache=False).logits
        return logits[0].float()

    def check_logprobs(
        self, before: Sequence[int], tokens: Sequence[int], logprobs: Sequence[float]
    ) -> None:
        """Compares the log-probabilities of tokens that follow others."""
        assert len(tokens) == len(logprobs)
        self._check(before, tokens, logprobs, is_greedy=False)

    def check_greedy(
        self, before: Sequence[int], tokens: Sequence[int], logprobs: Sequence[float]
    ) -> None:
        """Compares generated tokens, and their log-probabilities, with the likeliest ones."""
        assert len(tokens) == len(logprobs)
        self._check(before, tokens, logprobs, is_greedy=True)

    def check_top(
        self,
        before: Sequence[int],
        tokens: Sequence[int],
        tops: Sequence[TopLogprobs | ClientTopLogprobs],
    ) -> None:
        """Compares the most likely tokens in each token's place with the likeliest ones."""
        assert len(tokens) == len(tops)
        if not tokens:
            return
        expected = self.logits([*before, *tokens])[len(before) - 1 : -1].log_softmax(dim=-1)
        for row, top in zip(expected, tops, strict=True):
            values = torch.tensor(top.logprobs)
            best = row.topk(len(top.logprobs)).values
            torch.testing.assert_close(values, best, rtol=0, atol=TOLERANCE)
            picked = row[list(top.token_ids)]
            torch.testing.assert_close(values, picked, rtol=0, atol=TOLERANCE)

    def _check(
        self,
        before: Sequence[int],
        tokens: Sequence[int],
        logprobs: Sequence[float],
        *,
        is_greedy: bool,
    ) -> None:
        if not tokens:
            return
        logits = self.logits([*before, *tokens])[len(before) - 1 : -1]
        expected = logits.log_softmax(dim=-1)
        picked = expected[torch.arange(len(tokens)), torch.tensor(tokens)]
        torch.testing.assert_close(
            torch.tensor(logprobs, dtype=picked.dtype), picked, rtol=0, atol=TOLERANCE
        )
        if is_greedy:
            best, second = logits.topk(2, dim=-1).values.unbind(dim=-1)
            is_clear = best - second > CLEAR_GAP
            assert torch.equal(torch.tensor(tokens)[is_clear], logits.argmax(dim=-1)[is_clear]), (
                "a token is not the likeliest one"
            )


TOP_LOGPROBS = 3
"""Most likely tokens that every generation here reports."""
MOST_STEPS = 2000
"""Steps that any program of these tests ends in."""


@dataclass(slots=True)
class _Branch:
    """What one branch of a generation has brought so far."""

    context_id: str
    before: list[int]
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    tops: list[TopLogprobs] = field(default_factory=list)


@dataclass(slots=True)
class _Pending:
    """A call under way, and what its answer is to be compared with."""

    context_id: str | None
    before: list[int]
    given: list[list[int]]
    branches: list[_Branch] = field(default_factory=list)
    is_greedy: bool = True


def _reporting(max_tokens: int, options: dict[str, Any]) -> SamplingParams:
    return SamplingParams(
        max_tokens=max_tokens, logprobs=True, top_logprobs=TOP_LOGPROBS, **options
    )


class TwinBench:
    """An engine under test; `tokens` is what each context must hold."""

    def __init__(self, plain: PlainModel, made: TinyEngine, *, may_exhaust: bool = False) -> None:
        """Pairs the two; `may_exhaust` accepts calls that end with PoolExhausted."""
        self.plain = plain
        self.may_exhaust = may_exhaust
        self.made = made
        self.engine = made.engine
        self.tokens: dict[str, list[int]] = {}
        self.news: dict[Generation, list[Update]] = {}
        """Everything each generation has brought."""
        self._pending: dict[Operation, _Pending] = {}

    @property
    def idle(self) -> list[str]:
        """Contexts that no request is changing, oldest first."""
        busy = {
            context_id
            for pending in self._pending.values()
            for context_id in (pending.context_id, *(b.context_id for b in pending.branches))
        }
        return [context_id for context_id in self.tokens if context_id not in busy]

    @property
    def pending(self) -> list[Operation]:
        """Calls under way, oldest first."""
        return list(self._pending)

    # -- verbs -------------------------------------------------------------------------------

    def create(self, tokens: Sequence[int], *, logprobs: bool = False) -> Commit:
        """Begins to create a context."""
        operation = self.engine.contexts.create(TENANT, tokens, logprobs=logprobs)
        self._begin(operation, _Pending(None, [], [list(tokens)]))
        return operation

    def fork(self, parent: str, *, count: int = 1, at: int | None = None) -> list[str]:
        """Forks; asserts that it costs no block."""
        before = self.engine.view()
        views = self.engine.contexts.fork(TENANT, parent, count=count, at=at)
        after = self.engine.view()
        assert after.pool.free == before.pool.free, "a fork takes no block"
        assert after.computed_tokens == before.computed_tokens
        for view in views:
            self.tokens[view.id] = self.tokens[parent][:at]
        return [view.id for view in views]

    def extend(self, context_id: str, tokens: Sequence[int], *, logprobs: bool = False) -> Commit:
        """Begins to extend an idle context."""
        operation = self.engine.contexts.extend(TENANT, context_id, tokens, logprobs=logprobs)
        before = list(self.tokens[context_id])
        self._begin(operation, _Pending(context_id, before, [list(tokens)]))
        return operation

    def generate(self, context_id: str, max_tokens: int, **options: Any) -> Generation:
        """Begins to generate on an idle context, greedily unless the options say otherwise."""
        params = _reporting(max_tokens, options)
        operation = self.engine.inference.generate(TENANT, context_id, params)
        branch = _Branch(context_id, list(self.tokens[context_id]))
        self._begin(operation, _Pending(None, [], [], [branch], params.is_greedy))
        return operation

    def generate_branches(
        self, parent: str, count: int, max_tokens: int, *, at: int | None = None, **options: Any
    ) -> Generation:
        """Begins to generate on new branches of a context."""
        params = _reporting(max_tokens, options)
        operation = self.engine.inference.generate_branches(TENANT, parent, count, params, at=at)
        before = self.tokens[parent][:at]
        self._begin(operation, _Pending(None, before, [], is_greedy=params.is_greedy))
        return operation

    def score(self, context_id: str, continuations: Sequence[Sequence[int]]) -> Scoring:
        """Begins to score continuations of a context."""
        operation = self.engine.inference.score(TENANT, context_id, continuations)
        before = list(self.tokens[context_id])
        self._begin(operation, _Pending(None, before, [list(each) for each in continuations]))
        return operation

    def truncate(self, context_id: str, length: int) -> None:
        """Truncates an idle context."""
        self.engine.contexts.truncate(TENANT, context_id, length)
        del self.tokens[context_id][length:]

    def release(self, context_id: str) -> None:
        """Releases a context; what runs on it must end with CONTEXT_RELEASED."""
        _, ended = self.engine.contexts.release(TENANT, [context_id])
        del self.tokens[context_id]
        self._take(ended)

    def cancel(self, operation: Operation) -> None:
        """Cancels a call: what was committed before stays."""
        self.engine.cancel(operation)
        pending = self._pending.pop(operation)
        if isinstance(operation, Generation):
            self._take_news(operation, pending)
            self._compare_branches(pending)
        self.audit()

    # -- time --------------------------------------------------------------------------------

    def step(self) -> None:
        """Runs one step and compares what it brought; everything free is poisoned again."""
        self._take(self.engine.step())

    def run(self) -> None:
        """Steps until nothing is under way."""
        for _ in range(MOST_STEPS):
            if not self._pending:
                return
            self.step()
        raise AssertionError("the engine makes no progress")

    def audit(self) -> None:
        """Checks the bookkeeping, and that each context holds its tokens."""
        self.engine.check()
        self.made.poison_free()
        for context_id, tokens in self.tokens.items():
            assert self.made.tokens(TENANT, context_id) == tokens, f"{context_id} lost its tokens"
        for operation in self._pending:
            for request in operation.requests:
                if request.counter is not None:
                    self._audit_counter(request, request.counter)

    def check_leaves(self, continuation: Sequence[int]) -> None:
        """Compares every context once more: the whole distribution at its head, and what follows.

        Args:
            continuation: Tokens to score after each context.
        """
        for context_id, tokens in self.tokens.items():
            if not tokens:
                continue
            self.score(context_id, [continuation, continuation[::-1]])
        self.run()
        for context_id in list(self.tokens):
            if self.tokens[context_id]:
                self._check_head(context_id)
                self.generate(context_id, 3)
        self.run()
        self.audit()

    def close(self) -> None:
        """Releases everything; asserts that the pool is whole."""
        for context_id in list(self.tokens):
            self.release(context_id)
        self.engine.flush_cache()
        self.engine.check()
        view = self.engine.view()
        assert view.pool.free == view.pool.total, "blocks leaked"
        assert (view.num_contexts, view.num_running, view.num_waiting) == (0, 0, 0)

    # -- inside ------------------------------------------------------------------------------

    def _audit_counter(self, request: Request, counter: TokenCounter) -> None:
        """Checks that counts are those of committed tokens, whatever happened on the way."""
        assert request.params is not None
        tokens = self.tokens.get(request.context.id)
        if tokens is None or len(tokens) != request.context.length:
            return  # released, or its news are yet to be read
        first = 0 if request.params.penalize_prompt else len(tokens) - request.generated_tokens
        snapshot = counter.snapshot()
        counted = dict(zip(snapshot.token_ids, snapshot.counts, strict=True))
        assert counted == Counter(tokens[first:]), "penalties count other tokens than committed"

    def _begin(self, operation: Operation, pending: _Pending) -> None:
        self._pending[operation] = pending
        self._take([operation])

    def _take(self, operations: Sequence[Operation]) -> None:
        for operation in operations:
            pending = self._pending[operation]
            if isinstance(operation, Generation):
                self._take_news(operation, pending)
            if not operation.is_done:
                continue
            del self._pending[operation]
            if operation.error is not None:
                self._require_expected(operation.error)
            elif isinstance(operation, Commit):
                self._compare_commit(operation, pending)
            elif isinstance(operation, Scoring):
                for given, score in zip(pending.given, operation.answer.scores, strict=True):
                    self.plain.check_logprobs(pending.before, given, score.logprobs)
            self._compare_branches(pending)
        self.audit()

    def _take_news(self, operation: Generation, pending: _Pending) -> None:
        news = operation.take_news()
        self.news.setdefault(operation, []).extend(news)
        for update in news:
            match update:
                case Branches(contexts):
                    for view in contexts:
                        pending.branches.append(_Branch(view.id, list(pending.before)))
                        self.tokens[view.id] = list(pending.before)
                case Chunk():
                    branch = pending.branches[update.branch]
                    branch.tokens += update.token_ids
                    branch.logprobs += update.logprobs
                    branch.tops += update.top_logprobs
                    if update.token_ids:  # a released context only has text left to say
                        self.tokens[branch.context_id] += update.token_ids
                case Finish():
                    if update.error is not None:
                        self._require_expected(update.error)

    def _compare_commit(self, operation: Commit, pending: _Pending) -> None:
        answer, (given,) = operation.answer, pending.given
        context_id = pending.context_id or answer.context.id
        self.tokens[context_id] = [*pending.before, *given]
        if answer.logprobs:
            known = pending.before or given[:1]  # nothing precedes the very first token
            scored = given if pending.before else given[1:]
            self.plain.check_logprobs(known, scored, answer.logprobs)

    def _compare_branches(self, pending: _Pending) -> None:
        check = self.plain.check_greedy if pending.is_greedy else self.plain.check_logprobs
        for branch in pending.branches:
            check(branch.before, branch.tokens, branch.logprobs)
            self.plain.check_top(branch.before, branch.tokens, branch.tops)

    def _check_head(self, context_id: str) -> None:
        head = self.made.head(TENANT, context_id)
        if head is not None:
            expected = self.plain.logits(self.tokens[context_id])[-1]
            torch.testing.assert_close(head, expected, rtol=0, atol=TOLERANCE)

    def _require_expected(self, error: Exception) -> None:
        """Passes over how a call may end here; anything else is a fault of the engine."""
        if isinstance(error, NotFound) and error.reason is Reason.CONTEXT_RELEASED:
            return
        if isinstance(error, PoolExhausted) and self.may_exhaust:
            return
        raise AssertionError("a call failed") from error
