"""What one forward pass computes, as plain integers.

The scheduler writes a Batch, the runner reads it, nobody changes it. It names blocks and rows,
never tensors, and knows nothing of requests: answers come back in the order of `samples`,
`heads` and `scores`.

    rows      one query token each: its id, its position, the slot its KV goes to
    runs      consecutive positions of KV that some rows read; one per segment on a path
    copies    copy-on-write, done before any row is written
"""

from dataclasses import dataclass
from typing import NamedTuple

from agentkv.core.matcher import AllowedTokens
from agentkv.core.token_counter import TokenCounts
from agentkv.core.token_rules import TokenRules
from agentkv.sampling_params import SamplingParams

NO_SLOT = -1
"""Slot of a row whose KV is in the pool already: the row is computed for its logits alone."""


class BlockCopy(NamedTuple):
    """Copy the first `num_tokens` slots of a block into another, in every layer."""

    src_block_id: int
    dst_block_id: int
    num_tokens: int


class Run(NamedTuple):
    """KV positions [start, end) and the rows that read them.

    A row at position p reads the positions of its runs below p + 1, so a run may reach beyond
    what a row reads: that is causality among a branch's own new tokens. A run's rows are
    consecutive because the scheduler puts rows in the order of the tree.
    """

    segment_id: int
    start: int
    end: int
    block_ids: tuple[int, ...]
    """Blocks from the one that holds `start` on: the (start // block_size)-th of the path first."""
    first_row: int
    num_rows: int


class AdapterRows(NamedTuple):
    """Consecutive rows that are computed with one adapter."""

    adapter: str
    first_row: int
    num_rows: int


class Stream(NamedTuple):
    """A branch's random stream; the draw for a token is a function of it and the position."""

    seed: int
    ordinal: int
    """The branch's number among those forked in one call; 0 for a context used alone."""


class Sample(NamedTuple):
    """One token to choose."""

    row: int | None
    """Row whose logits to use, or None: use `head`."""
    head: object
    """Logits kept by an earlier step (opaque here), or None."""
    params: SamplingParams
    stream: Stream
    position: int
    """Position the chosen token will have."""
    allowed: AllowedTokens | None = None
    """The tokens to choose from; None: all."""
    rules: TokenRules | None = None
    """What the request says of single tokens."""
    masks: tuple[bytes, ...] = ()
    """Further sets of tokens that may be chosen: bit i % 8 of byte i // 8 stands for token i. Of
    at least as many bits as there are tokens; a token must be in all of them."""
    counts: TokenCounts | None = None
    """How often tokens occurred, for penalties; None counts none."""


class Score(NamedTuple):
    """One log-probability to report: that of `token` under the logits of a row or a head."""

    row: int | None
    head: object
    token: int


@dataclass(frozen=True, slots=True)
class Batch:
    """One step."""

    token_ids: tuple[int, ...]
    positions: tuple[int, ...]
    slots: tuple[int, ...]
    """Slot of each row, block_id * block_size + offset, or NO_SLOT."""
    runs: tuple[Run, ...]
    copies: tuple[BlockCopy, ...]
    samples: tuple[Sample, ...]
    heads: tuple[int, ...]
    """Rows whose logits the caller wants to keep."""
    scores: tuple[Score, ...]
    adapters: tuple[AdapterRows, ...] = ()
    """Rows with adapters, ascending; the others are the model's own."""

    @property
    def num_rows(self) -> int:
        """Query tokens of this step."""
        return len(self.token_ids)


class TopLogprobs(NamedTuple):
    """The most likely tokens at one position, most likely first; of equals the lowest id first."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]


class Sampled(NamedTuple):
    """One chosen token."""

    token: int
    logprob: float | None
    """Natural logarithm, before every sampling option; None when it was not asked for."""
    failed: bool = False
    """The logits were not finite: no token was chosen, and the sequence must end."""
    is_stuck: bool = False
    """It failed because no token may be chosen: each one's logit is -inf."""
    top: TopLogprobs | None = None
    """The most likely tokens there, as many as were asked for."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a runner answers, in the order the Batch asked."""

    samples: tuple[Sampled, ...]
    heads: tuple[object, ...]
    scores: tuple[float, ...]
