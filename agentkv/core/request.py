"""One queued operation on one context: compute what has no KV, then perhaps sample.

Create, Extend, Generate and each continuation of Score are all this: they differ in how many
tokens they sample (none, or up to `max_tokens`) and in whether they report log-probabilities of
tokens that were given.
"""

from dataclasses import dataclass, field
from enum import Enum, StrEnum
from typing import NamedTuple

from agentkv.core.batch import Stream, TopLogprobs
from agentkv.core.context import Context
from agentkv.core.drafter import Drafter
from agentkv.core.matcher import Matcher
from agentkv.core.rendering import Rendering
from agentkv.core.token_counter import TokenCounter
from agentkv.core.token_rules import TokenRules
from agentkv.core.views import Usage
from agentkv.errors import AgentKVError
from agentkv.sampling_params import SamplingParams

_NO_STREAM = Stream(seed=0, ordinal=0)


class RequestStatus(Enum):
    """Where a request is; it is in exactly one of the scheduler's lists, or done."""

    WAITING = "waiting"
    RUNNING = "running"
    DONE = "done"


class FinishReason(StrEnum):
    """Why a branch stopped generating."""

    STOP = "stop"
    """A stop text, a stop token or the model's end of sequence."""
    LENGTH = "length"
    """`max_tokens`, or the model's longest context."""
    ERROR = "error"
    """The request failed; what was committed before stays."""
    DEAD_END = "dead_end"
    """No token of the model continues the text as its constraint wants it."""
    TOOL_CALL = "tool_call"
    """The text is whole, and calls a tool."""


@dataclass(slots=True, eq=False)
class Request:
    """One operation; its context's tail already holds the tokens it was given."""

    id: int
    """Arrival order: older requests go first, younger ones give way."""
    context: Context
    params: SamplingParams | None = None
    """How to sample; None samples nothing."""
    stream: Stream = _NO_STREAM
    end_token_ids: frozenset[int] = frozenset()
    """Ids that end generation."""
    matcher: Matcher | None = None
    """Where its text is in the grammar that constrains it; None: any token may follow."""
    rules: TokenRules | None = None
    """What the request says of single tokens."""
    early_rules: TokenRules | None = None
    """The same before `params.min_tokens` are generated: no token ends it then."""
    counter: TokenCounter | None = None
    """Tokens that penalties count, all of them committed; None without penalties."""
    drafter: Drafter | None = None
    """How far steps guess ahead; None: not at all."""
    next_scored: int | None = None
    """Position of the next given token whose log-probability is wanted; None wants none."""
    head: object = None
    """Logits before the first scored token, when they were kept."""
    is_continued: bool = True
    """Whether something may follow its last token, which needs KV and logits then."""
    status: RequestStatus = RequestStatus.WAITING
    num_promised: int = 0
    """Blocks that admission counted for it and it has not taken yet."""
    rendering: Rendering | None = None
    """What a chat template wrote of the context once its given tokens are committed."""
    computed_tokens: int = 0
    cached_tokens: int | None = None
    """Known once it is first scheduled."""
    generated_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    logprobs: list[float] = field(default_factory=list)
    """Of the scored tokens so far."""

    @property
    def is_running(self) -> bool:
        """Whether it is among those that steps compute."""
        return self.status is RequestStatus.RUNNING

    @property
    def usage(self) -> Usage:
        """Tokens run, reused and made so far."""
        return Usage(
            self.computed_tokens,
            self.cached_tokens or 0,
            self.generated_tokens,
            self.drafted_tokens,
            self.accepted_tokens,
        )

    def rules_after(self, num_more: int = 0) -> TokenRules | None:
        """What holds for the next token once so many more are generated."""
        assert self.params is not None
        is_early = self.generated_tokens + num_more < self.params.min_tokens
        return self.early_rules if is_early else self.rules

    @property
    def target(self) -> int:
        """Position up to which its path's tokens must be run."""
        return self.context.tail.end - (not self.is_continued)

    @property
    def first_scored_row(self) -> int | None:
        """Position whose logits give the next scored token; None when no row is needed for it."""
        if self.next_scored is None or self.head is not None:
            return None
        return self.next_scored - 1


class Event(NamedTuple):
    """What one step did for one request."""

    request: Request
    token: int | None = None
    logprob: float | None = None
    finish: FinishReason | None = None
    error: AgentKVError | None = None
    top: TopLogprobs | None = None
    num_later: int = 0
    """Tokens that the same step committed after this one."""
