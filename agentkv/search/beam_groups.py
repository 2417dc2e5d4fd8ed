"""Beam search as arithmetic: log-probabilities in, the next tokens of each beam out.

Follows the vectorised beam search of transformers 5, so that the same options give the same
sequences and scores, and for several groups diverse beam search (A. K. Vijayakumar et al., 2016,
with the Hamming diversity). It knows no context and no server.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from agentkv.errors import InvalidRequest
from agentkv.sampling_params import MAX_TOP_LOGPROBS


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamOptions:
    """What is searched for.

    Raises:
        InvalidRequest: An option is out of range, or more log-probabilities are needed at each
            step than servers report.
    """

    num_beams: int
    """Sequences kept at each step, at least 1; of all groups together."""
    max_tokens: int
    """Longest sequence, at least 1."""
    end_token_ids: tuple[int, ...] = ()
    """Tokens that end a sequence, as its last one."""
    length_penalty: float = 1.0
    """Exponent of the length by which log-probabilities are divided; above 0 favours long ones."""
    early_stopping: bool | Literal["never"] = False
    """True: stop once `num_beams` sequences have ended. False: once none that runs is better at
    its length. "never": once none can become better."""
    num_groups: int = 1
    """Groups of equally many beams, each searched on its own."""
    diversity_penalty: float = 0.0
    """Subtracted from the log-probability of a token once for each beam of an earlier group that
    takes it at the same step; not negative."""

    def __post_init__(self) -> None:
        violations = {}
        if self.num_beams < 1:
            violations["num_beams"] = "must be at least 1"
        if self.max_tokens < 1:
            violations["max_tokens"] = "must be at least 1"
        if self.num_groups < 1 or self.num_beams % self.num_groups:
            violations["num_groups"] = "must divide num_beams"
        if not self.diversity_penalty >= 0:
            violations["diversity_penalty"] = "must not be negative"
        if not violations and self.num_top > MAX_TOP_LOGPROBS:
            violations["num_beams"] = f"needs {self.num_top} log-probabilities of each beam; " + (
                f"at most {MAX_TOP_LOGPROBS} are reported"
            )
        if violations:
            listed = "; ".join(f"{field}: {what}" for field, what in violations.items())
            raise InvalidRequest(f"Cannot search: {listed}.", violations=violations)

    @property
    def group_size(self) -> int:
        """Beams of one group."""
        return self.num_beams // self.num_groups

    @property
    def num_kept(self) -> int:
        """Candidates of a group at each step: enough to go on when the best of them end."""
        return max(2, 1 + len(self.end_token_ids)) * self.group_size

    @property
    def num_top(self) -> int:
        """Most likely tokens that must be known of each beam: a penalty may move some down."""
        return self.num_kept + self.num_beams - self.group_size


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A sequence that was found."""

    token_ids: tuple[int, ...]
    """What follows the context, the token that ended it included."""
    logprob: float
    """Natural logarithm of its probability."""
    score: float
    """What it was ranked by: less diversity penalties, divided by length ** `length_penalty`."""


class Growth(NamedTuple):
    """One beam of the next step."""

    parent: int
    """Its place among the beams before."""
    token: int


class _Beam(NamedTuple):
    token_ids: tuple[int, ...]
    logprob: float
    total: float
    """The same less diversity penalties."""


class _Candidate(NamedTuple):
    beam: _Beam
    parent: int

    @property
    def token(self) -> int:
        return self.beam.token_ids[-1]


TopTokens = Sequence[tuple[int, float]]
"""Tokens with their log-probabilities, the most likely first."""


class BeamGroup:
    """Beams of one group, and the best sequences that have ended.

    Invariants: `running` is in descending order of totals; `finished` holds at most a group's
    size, in descending order of scores.
    """

    def __init__(self, options: BeamOptions) -> None:
        self.running = [_Beam((), 0.0, 0.0)]
        self.finished: list[Hypothesis] = []
        self.is_done = False
        self._options = options
        self._is_improvable = True

    def step(self, tops: Sequence[TopTokens], taken: Counter[int]) -> list[Growth]:
        """Moves every beam on by one token.

        Args:
            tops: Of each running beam, at least `num_top` or all tokens.
            taken: How many beams of earlier groups take which token at this step.

        Returns:
            The beams that run from now on; none once the group is done.
        """
        options = self._options
        length = len(self.running[0].token_ids) + 1
        kept = self._candidates(tops, taken)
        is_last = length >= options.max_tokens
        hits = [is_last or candidate.token in options.end_token_ids for candidate in kept]
        going = [item for item, hit in zip(kept, hits, strict=True) if not hit]
        going = going[: options.group_size]
        ended = [item.beam for item, hit in zip(kept, hits, strict=True) if hit]
        best = {item.beam for item in kept[: options.group_size]}
        self._finish([beam for beam in ended if beam in best], length)
        if all(hits):
            self.is_done = True
            return []
        self.running = [item.beam for item in going]
        self._is_improvable = self._is_improvable and self._can_improve(length)
        self.is_done = not self._is_improvable or (self._is_full and options.early_stopping is True)
        return [] if self.is_done else [Growth(item.parent, item.token) for item in going]

    @property
    def _is_full(self) -> bool:
        return len(self.finished) == self._options.group_size

    def _candidates(self, tops: Sequence[TopTokens], taken: Counter[int]) -> list[_Candidate]:
        penalty = self._options.diversity_penalty
        candidates = [
            _Candidate(
                _Beam(
                    (*beam.token_ids, token),
                    beam.logprob + value,
                    beam.total + value - penalty * taken[token],
                ),
                parent,
            )
            for parent, (beam, top) in enumerate(zip(self.running, tops, strict=True))
            for token, value in top
        ]
        candidates.sort(key=lambda item: -item.beam.total)
        return candidates[: self._options.num_kept]

    def _finish(self, ended: Sequence[_Beam], length: int) -> None:
        """Ranks sequences that end now among those that ended before."""
        options = self._options
        if not self._is_improvable or (self._is_full and options.early_stopping is True):
            return
        divisor = length**options.length_penalty
        found = [Hypothesis(beam.token_ids, beam.logprob, beam.total / divisor) for beam in ended]
        ranked = sorted([*self.finished, *found], key=lambda item: -item.score)
        self.finished = ranked[: options.group_size]

    def _can_improve(self, length: int) -> bool:
        """Whether the best running beam could still beat the worst one that has ended."""
        options = self._options
        if not self._is_full:
            return True
        reaches_on = options.early_stopping == "never" and options.length_penalty > 0
        hoped = options.max_tokens if reaches_on else length
        best: float = self.running[0].total / hoped**options.length_penalty
        return best > self.finished[-1].score
