"""What the engine answers: frozen values, in the order a stream delivers them.

A stream is `Branches` once and first, any number of `Chunk`s, and one `Finish` per branch.
"""

from dataclasses import dataclass

from agentkv.core.batch import TopLogprobs
from agentkv.core.disk_statistics import DiskStatistics
from agentkv.core.request import FinishReason
from agentkv.core.views import ContextView, PoolView, Usage
from agentkv.engine.conversation import Conversation
from agentkv.engine.tool_format import ToolCall
from agentkv.errors import AgentKVError


@dataclass(frozen=True, slots=True)
class Branches:
    """The contexts of a stream, by branch number."""

    contexts: tuple[ContextView, ...]


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens one step committed to one branch, and the text they completed."""

    branch: int
    token_ids: tuple[int, ...]
    text: str
    """May be empty (half a character, a held-back stop) or longer than the tokens' own text."""
    logprobs: tuple[float, ...]
    """One per token when `logprobs` was asked for, else empty."""
    top_logprobs: tuple[TopLogprobs, ...] = ()
    """The most likely tokens in each one's place when they were asked for, else empty."""


@dataclass(frozen=True, slots=True)
class Finish:
    """The end of one branch."""

    branch: int
    reason: FinishReason
    context: ContextView | None
    """The context after its last committed token; None when it was released meanwhile."""
    usage: Usage
    pool: PoolView
    """Blocks of the pool at the end of the branch."""
    seed: int | None
    """Seed that replays the branch; None when greedy."""
    error: AgentKVError | None = None
    stop: str | None = None
    """The stop text that ended it, if one did."""
    num_tokens_before_stop: int | None = None
    """Generated tokens that lie wholly before the stop: truncate to there to drop it."""
    num_characters_before_stop: int | None = None
    """Characters of the generated text before the stop."""
    tool_calls: tuple[ToolCall, ...] = ()
    """What the model asks its caller to do, when the reason is TOOL_CALL."""


Update = Branches | Chunk | Finish


@dataclass(frozen=True, slots=True)
class Committed:
    """Answer of Create and Extend."""

    context: ContextView
    usage: Usage
    pool: PoolView
    logprobs: tuple[float, ...] = ()
    """Of each given token given all before it, when asked for; nothing precedes the very first."""


@dataclass(frozen=True, slots=True)
class Forked:
    """Answer of Fork, in the order of the branches' numbers."""

    contexts: tuple[ContextView, ...]
    pool: PoolView


@dataclass(frozen=True, slots=True)
class Truncated:
    """Answer of Truncate."""

    context: ContextView
    pool: PoolView


@dataclass(frozen=True, slots=True)
class Leased:
    """Answer of UpdateLease."""

    context: ContextView
    """The context named, with the lease that was granted."""
    num_updated: int
    """Contexts whose lease was renewed or replaced."""
    pool: PoolView


@dataclass(frozen=True, slots=True)
class ContextTokens:
    """A context and tokens of it, as of one moment."""

    context: ContextView
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ChatState:
    """The conversation a context was made of, as of one moment."""

    conversation: Conversation
    turn_ids: tuple[int, ...]
    """What follows its tokens: the turn it left open."""
    length: int
    """Committed tokens of the context, `turn_ids` included."""


@dataclass(frozen=True, slots=True)
class ContinuationScore:
    """Log-probabilities of one continuation, natural logarithm, one per token."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]

    @property
    def total(self) -> float:
        """Log-probability of the whole continuation."""
        return sum(self.logprobs)


@dataclass(frozen=True, slots=True)
class Scores:
    """Answer of Score, in the order of the continuations."""

    scores: tuple[ContinuationScore, ...]
    usage: Usage


@dataclass(frozen=True, slots=True)
class Released:
    """Answer of Release."""

    num_released: int
    blocks_freed: int
    """Blocks no context holds any more: free, or cached until needed."""
    pool: PoolView


@dataclass(frozen=True, slots=True)
class SnapshotView:
    """A snapshot as its owner sees it."""

    name: str
    create_time: float
    """Seconds since the epoch."""
    model_name: str
    num_contexts: int
    num_tokens: int
    """Tokens, shared ones once."""
    num_kv_tokens: int
    """Those of them whose KV it holds."""
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Saved:
    """Answer of Save."""

    snapshot: SnapshotView
    pool: PoolView


@dataclass(frozen=True, slots=True)
class Restored:
    """Answer of Restore."""

    contexts: tuple[ContextView, ...]
    """Ancestors first."""
    saved_ids: tuple[str, ...]
    """Their handles when they were saved, in the same order."""
    num_kv_tokens: int
    """Tokens whose KV came back; the others are computed at the next use."""
    kv_refusal: str
    """Why KV that the snapshot has was not used; empty when all of it was, or none was wanted."""
    pool: PoolView


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What a client may want to know of the model."""

    name: str
    architecture: str
    vocab_size: int
    """Width of the logits: every token id is below it."""
    max_length: int
    """Most committed tokens of one context."""
    num_layers: int
    dtype: str
    bytes_per_block: int
    has_chat_template: bool
    weights: str = "float32"
    """What they are kept as."""
    weight_bytes: int = 0
    adapters: tuple[str, ...] = ()
    """Names of the adapters that contexts may be created with."""
    host_bytes_per_block: int = 0
    """Of a block in a lower tier; 0 without one."""


@dataclass(frozen=True, slots=True)
class EngineView:
    """The engine at a glance."""

    model: ModelFacts
    pool: PoolView
    num_contexts: int
    num_running: int
    num_waiting: int
    computed_tokens: int
    """Rows run since start."""
    num_forks: int
    num_block_copies: int
    num_preemptions: int
    num_moved_out: int = 0
    """Blocks that left the device for the host since start."""
    num_brought_back: int = 0
    """Blocks that came back to the device since start."""
    num_lost: int = 0
    """Blocks that could not be read back, and were recomputed."""
    disk: DiskStatistics | None = None
    """What the disk tier has done; None without one."""
