"""What the engine does for one call: the requests it takes, and how their events become answers.

An operation turns events of the scheduler into values; it queues nothing and touches no tree.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from agentkv.core.batch import TopLogprobs
from agentkv.core.context import Context
from agentkv.core.request import Event, FinishReason, Request, RequestStatus
from agentkv.core.views import ContextView, PoolView, Usage
from agentkv.engine.detokenizer import Detokenizer, TextDelta
from agentkv.engine.outputs import (
    Branches,
    Chunk,
    Committed,
    ContinuationScore,
    Finish,
    Scores,
    Update,
)
from agentkv.engine.tool_format import ToolCall
from agentkv.errors import AgentKVError, Reason


class Operation(ABC):
    """One call in progress.

    Invariants: once `is_done`, either `error` is set or the answer is complete, and it never
    changes again.
    """

    def __init__(self, requests: Sequence[Request]) -> None:
        self.requests = tuple(requests)
        self.error: AgentKVError | None = None

    @property
    def is_done(self) -> bool:
        """Whether every request has ended."""
        return all(request.status is RequestStatus.DONE for request in self.requests)

    @property
    def leftovers(self) -> tuple[Context, ...]:
        """Contexts that nobody has a handle of once the operation is done."""
        return ()

    @abstractmethod
    def on_event(self, event: Event) -> None:
        """Takes in what a step did for one of its requests."""


class Commit(Operation):
    """Create or Extend: given tokens get their KV and are committed, all or none."""

    def __init__(
        self,
        context: Context,
        requests: Sequence[Request],
        view: Callable[[Context], ContextView],
        pool: Callable[[], PoolView],
        *,
        is_create: bool = False,
    ) -> None:
        super().__init__(requests)
        self.context = context
        self.is_create = is_create
        self._view = view
        self._pool = pool
        self._answer: Committed | None = None

    @property
    def answer(self) -> Committed:
        """The context as it was when the last of its tokens was committed."""
        assert self.is_done and self.error is None
        if self._answer is None:  # no token was given, so nothing had to run
            self._answer = Committed(self._view(self.context), Usage(), self._pool())
        return self._answer

    @property
    def leftovers(self) -> tuple[Context, ...]:
        """A context whose first tokens were never committed."""
        return (self.context,) if self.is_create and self._answer is None else ()

    @property
    def has_failed(self) -> bool:
        """Whether a Create ended without a context: it failed or was cancelled."""
        return self.is_done and bool(self.leftovers)

    def on_event(self, event: Event) -> None:
        """Completes the answer; a request that only commits has one event, its last."""
        self.error = event.error
        if event.error is None:
            request = event.request
            self._answer = Committed(
                self._view(self.context), request.usage, self._pool(), tuple(request.logprobs)
            )


class Scoring(Operation):
    """Score: each continuation is a hidden branch, released at the end."""

    def __init__(self, requests: Sequence[Request], continuations: Sequence[Sequence[int]]) -> None:
        super().__init__(requests)
        self._continuations = [tuple(tokens) for tokens in continuations]

    @property
    def leftovers(self) -> tuple[Context, ...]:
        """The hidden branches."""
        return tuple(request.context for request in self.requests)

    @property
    def answer(self) -> Scores:
        """Scores in the order of the continuations."""
        assert self.is_done and self.error is None
        scored = zip(self._continuations, self.requests, strict=True)
        return Scores(
            tuple(ContinuationScore(tokens, tuple(request.logprobs)) for tokens, request in scored),
            sum((request.usage for request in self.requests), Usage()),
        )

    def on_event(self, event: Event) -> None:
        """Keeps the first error."""
        self.error = self.error or event.error


@dataclass(slots=True)
class _Branch:
    """What one generating branch has produced since the last message."""

    number: int
    detokenizer: Detokenizer
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[TopLogprobs] = field(default_factory=list)
    text: str = ""


class Generation(Operation):
    """Generate or GenerateBranches: a stream of updates."""

    def __init__(
        self,
        requests: Sequence[Request],
        detokenizers: Sequence[Detokenizer],
        view: Callable[[Context], ContextView],
        pool: Callable[[], PoolView],
        end: Callable[[Request, int], None],
        *,
        read_calls: Callable[[Context], Sequence[ToolCall]],
        seed: int | None,
        is_single: bool,
    ) -> None:
        super().__init__(requests)
        self._branches = {
            request: _Branch(number, detokenizer)
            for number, (request, detokenizer) in enumerate(
                zip(requests, detokenizers, strict=True)
            )
        }
        self._view = view
        self._pool = pool
        self._end = end
        self._read_calls = read_calls
        self._seed = seed
        self._is_single = is_single
        self._news: list[Update] = []
        if not is_single:
            self._news.append(Branches(tuple(view(request.context) for request in requests)))
        self._finishes: list[Finish] = []

    @property
    def has_more(self) -> bool:
        """Whether something is left after news were taken: never, they are taken at once."""
        return False

    def take_news(self) -> tuple[Update, ...]:
        """Hands over what came since the last call: at most one chunk per branch."""
        for branch in self._branches.values():
            if branch.token_ids or branch.text:
                self._news.append(
                    Chunk(
                        branch.number,
                        tuple(branch.token_ids),
                        branch.text,
                        tuple(branch.logprobs),
                        tuple(branch.top_logprobs),
                    )
                )
                branch.token_ids, branch.logprobs, branch.text = [], [], ""
                branch.top_logprobs = []
        news = (*self._news, *self._finishes)
        self._news, self._finishes = [], []
        return news

    def on_event(self, event: Event) -> None:
        """Adds a token to its branch, and ends the branch at a stop text."""
        branch, request = self._branches[event.request], event.request
        delta = TextDelta("")
        if event.token is not None:
            branch.token_ids.append(event.token)
            if event.logprob is not None:
                branch.logprobs.append(event.logprob)
            if event.top is not None:
                branch.top_logprobs.append(event.top)
            if event.finish is FinishReason.STOP and event.token in request.end_token_ids:
                delta = self._stop_at(request, branch, event.token)
            else:
                delta = branch.detokenizer.push(event.token)
                branch.text += delta.text
            if delta.stopped is not None:
                event = event._replace(finish=FinishReason.STOP, error=None)
                self._end(request, event.num_later)
        if event.finish is None:
            return
        if delta.stopped is None:
            branch.text += branch.detokenizer.flush()
        self._finish(event, branch.number, event.finish, delta)

    def _stop_at(self, request: Request, branch: _Branch, token: int) -> TextDelta:
        """Ends the text before a stop token, which is committed, or with it if that is wanted."""
        branch.text += branch.detokenizer.flush()
        num_characters = branch.detokenizer.num_characters
        if request.params is not None and request.params.include_stop:
            branch.text += branch.detokenizer.push(token).text
        return TextDelta("", None, request.generated_tokens - 1, num_characters)

    def _finish(
        self,
        event: Event,
        number: int,
        reason: FinishReason,
        last: TextDelta,
    ) -> None:
        if self._is_single:
            self.error = event.error
        is_released = event.error is not None and event.error.reason is Reason.CONTEXT_RELEASED
        calls: Sequence[ToolCall] = ()
        if (
            reason is FinishReason.STOP
            and last.stopped is None
            and event.request.matcher is not None
        ):
            calls = self._read_calls(event.request.context)
        self._finishes.append(
            Finish(
                branch=number,
                reason=FinishReason.TOOL_CALL if calls else reason,
                context=None if is_released else self._view(event.request.context),
                usage=event.request.usage,
                pool=self._pool(),
                seed=self._seed,
                error=event.error,
                stop=last.stopped,
                num_tokens_before_stop=last.num_tokens_before_stop,
                num_characters_before_stop=last.num_characters_before_stop,
                tool_calls=tuple(calls),
            )
        )
