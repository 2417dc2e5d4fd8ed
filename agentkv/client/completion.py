"""What a generation yields: pieces while it runs, one completion when it has ended.

Frozen values; how they are put together from messages is `agentkv.client.accumulate`'s.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Generic, TypeVar

from agentkv.client.values import Usage
from agentkv.errors import AgentKVError

HandleT = TypeVar("HandleT")


class FinishReason(StrEnum):
    """Why a branch stopped generating."""

    UNKNOWN = "unknown"
    """A newer server gives a reason this client does not know."""
    STOP = "stop"
    """A stop text, a stop token or the model's end of sequence."""
    LENGTH = "length"
    """`max_tokens`, or the model's longest context."""
    ERROR = "error"
    """A failure of this branch alone; see `Completion.error`."""
    DEAD_END = "dead_end"
    """No token of the model continues the text as its constraint wants it."""
    TOOL_CALL = "tool_call"
    """The text calls a tool; see `Completion.tool_calls`."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """What the model asks its caller to do."""

    name: str
    arguments: Mapping[str, Any]
    """As the tool's schema describes them."""


@dataclass(frozen=True, slots=True)
class TopLogprobs:
    """The most likely tokens at one position, most likely first."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """Natural logarithm of each one's probability, before every sampling option."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens committed to one branch since its last chunk, and the text they completed."""

    branch: int
    """Number of the branch, in [0, count); 0 when generating on one context."""
    token_ids: tuple[int, ...]
    text: str
    """May be empty (half a character, a held-back stop) or longer than the tokens' own text."""
    logprobs: tuple[float, ...]
    """One per token when `logprobs` was asked for, else empty."""
    top_logprobs: tuple[TopLogprobs, ...] = ()
    """One per token when `top_logprobs` was asked for, else empty."""


@dataclass(frozen=True, slots=True)
class Completion:
    """Everything one branch generated."""

    text: str
    """Without the stop text that ended it, unless `include_stop` was asked for."""
    token_ids: tuple[int, ...]
    """Every committed token, those of the stop included."""
    finish_reason: FinishReason
    usage: Usage
    seed: int | None = None
    """Seed that replays it; None when decoding was greedy."""
    logprobs: tuple[float, ...] = ()
    """Natural logarithm of each token's probability when asked for, else empty."""
    top_logprobs: tuple[TopLogprobs, ...] = ()
    """The most likely tokens in each token's place when asked for, else empty."""
    stop: str | None = None
    """The stop text that ended it, if one did."""
    num_tokens_before_stop: int | None = None
    """Generated tokens that lie wholly before the stop, if one ended it."""
    num_characters_before_stop: int | None = None
    """Characters of the text before the stop, if one ended it."""
    error: AgentKVError | None = None
    """What failed, when `finish_reason` is ERROR; what was committed before stays."""
    tool_calls: tuple[ToolCall, ...] = ()
    """What the model asks for, when `finish_reason` is TOOL_CALL."""

    @property
    def total_logprob(self) -> float:
        """Sum of `logprobs`; 0 when they were not asked for."""
        return sum(self.logprobs)


@dataclass(frozen=True, slots=True)
class BranchFinish:
    """The end of one branch of several; its last event."""

    branch: int
    completion: Completion


@dataclass(frozen=True, slots=True)
class GeneratedBranch(Generic[HandleT]):
    """One branch of several when all have ended: its context, and what was generated on it."""

    context: HandleT
    completion: Completion

    @property
    def text(self) -> str:
        """The completion's text."""
        return self.completion.text
