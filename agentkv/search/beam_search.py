"""Beam search on a context: each beam is a branch, and all beams share what they have in common.

    grow      one GenerateBranches per beam, all at once: it forks the beam's parent where the two
              part, forces the beam's token, and reports what may follow it
    choose    which tokens go on; no call
    release   the parents: what their branches share with them stays

To report what follows a token the server also samples what follows it; that token lies beyond the
beam and is cut off by the next fork. The context itself never changes.
"""

import asyncio
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Generic, NamedTuple, TypedDict, TypeVar, Unpack

from agentkv.client.async_context_handle import AsyncContextHandle
from agentkv.client.completion import Completion
from agentkv.client.context_handle import ContextHandle
from agentkv.client.sampling_options import SamplingOptions
from agentkv.errors import InvalidRequest
from agentkv.search.beam_groups import BeamGroup, BeamOptions, Growth, Hypothesis, TopTokens

HandleT = TypeVar("HandleT", ContextHandle, AsyncContextHandle)


class BeamKeywords(TypedDict, total=False):
    """Options of a search, by name; `BeamOptions` says what each means and its default."""

    num_beams: int
    max_tokens: int
    end_token_ids: tuple[int, ...]
    length_penalty: float
    early_stopping: bool | str
    num_groups: int
    diversity_penalty: float


class Branching(NamedTuple, Generic[HandleT]):
    """One beam to be grown: a fork of `context` at `at`, then `token`."""

    context: HandleT
    at: int
    token: int | None
    """None reports what follows the fork itself."""


class BeamPlan(Generic[HandleT]):
    """A search under way: which branches to make next, and what their answers mean."""

    def __init__(self, context: HandleT, options: BeamOptions) -> None:
        self._options = options
        self._length = context.length
        self._groups = [BeamGroup(options) for _ in range(options.num_groups)]
        self._beams: list[list[HandleT]] = [[] for _ in self._groups]
        self._places: list[list[int]] = []
        self.pending: list[Branching[HandleT]] = [Branching(context, self._length, None)]
        """Branches to make now, all at once; none when the search has ended."""

    @property
    def hypotheses(self) -> list[Hypothesis]:
        """What was found, the best first; those of all groups."""
        found = [item for group in self._groups for item in group.finished]
        return sorted(found, key=lambda item: -item.score)

    def sampling(self, branching: Branching[HandleT]) -> SamplingOptions:
        """Says how to grow a beam."""
        options = SamplingOptions(
            max_tokens=1,
            ignore_eos=True,
            logprobs=True,
            top_logprobs=self._options.num_top,
            num_speculative_tokens=0,
        )
        if branching.token is not None:
            options["allowed_token_ids"] = [branching.token]
            options["max_tokens"] = 2
        return options

    def absorb(self, grown: Sequence[HandleT], completions: Sequence[Completion]) -> None:
        """Takes in the branches of `pending`, in its order, and decides which come next.

        Raises:
            AgentKVError: A branch failed.
        """
        tops = [_top(item) for item in completions]
        if not self._places:  # the root answers for the first beam of every group
            self._places = [[0] for _ in self._groups]
        at = self._length + len(self._groups_running()[0].running[0].token_ids)
        taken: Counter[int] = Counter()
        self.pending, places = [], []
        for group, mine in zip(self._groups, self._places, strict=True):
            growths: list[Growth] = []
            if not group.is_done:
                growths = group.step([tops[place] for place in mine], taken)
            taken.update(growth.token for growth in growths)
            places.append(list(range(len(self.pending), len(self.pending) + len(growths))))
            self.pending += [
                Branching(grown[mine[growth.parent]], at, growth.token) for growth in growths
            ]
        self._places = places

    def _groups_running(self) -> list[BeamGroup]:
        return [group for group in self._groups if not group.is_done]


def beam_search(context: ContextHandle, **keywords: Unpack[BeamKeywords]) -> list[Hypothesis]:
    """Finds likely continuations of a context.

    Args:
        context: Where they begin; it does not change, and must not be changed meanwhile.
        keywords: Fields of BeamOptions: num_beams, max_tokens, end_token_ids, ...

    Returns:
        Up to `num_beams` sequences, the best first.

    Raises:
        InvalidRequest: An option is out of range.
        AgentKVError: A call failed. The branches made so far are released.
    """
    plan = BeamPlan(context, _options(keywords))
    parents: list[ContextHandle] = []
    try:
        while plan.pending:
            with ExitStack() as stack:
                streams = [
                    stack.enter_context(
                        item.context.generate_branches(1, at=item.at, **plan.sampling(item))
                    )
                    for item in plan.pending
                ]
                branches = [stream.result()[0] for stream in streams]
            _release(parents)
            parents = [branch.context for branch in branches]
            plan.absorb(parents, [branch.completion for branch in branches])
    finally:
        _release(parents)
    return plan.hypotheses


async def beam_search_async(
    context: AsyncContextHandle, **keywords: Unpack[BeamKeywords]
) -> list[Hypothesis]:
    """Finds likely continuations of a context; otherwise as `beam_search`."""
    plan = BeamPlan(context, _options(keywords))
    parents: list[AsyncContextHandle] = []
    try:
        while plan.pending:
            made = await asyncio.gather(
                *(
                    item.context.complete_branches(1, at=item.at, **plan.sampling(item))
                    for item in plan.pending
                )
            )
            await _release_async(parents)
            parents = [branch.context for (branch,) in made]
            plan.absorb(parents, [branch.completion for (branch,) in made])
    finally:
        await _release_async(parents)
    return plan.hypotheses


def _release(contexts: Sequence[ContextHandle]) -> None:
    for context in contexts:
        context.release()


async def _release_async(contexts: Sequence[AsyncContextHandle]) -> None:
    await asyncio.gather(*(context.release() for context in contexts))


def _options(keywords: BeamKeywords) -> BeamOptions:
    try:
        return BeamOptions(**keywords)  # type: ignore[arg-type]  # a text is checked, not typed
    except TypeError as error:
        raise InvalidRequest(f"Cannot search: {error}.") from None


def _top(completion: Completion) -> TopTokens:
    """Reads what may follow a beam."""
    if completion.error is not None:
        raise completion.error
    top = completion.top_logprobs[-1]
    return list(zip(top.token_ids, top.logprobs, strict=True))
