"""How the next token is chosen and when to stop: one frozen value, checked once.

It knows no model: what depends on the vocabulary is checked where the vocabulary is known.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from agentkv.errors import InvalidRequest

MAX_SEED = 2**63  # exclusive
MAX_STOPS = 64
MAX_STOP_CHARACTERS = 1024
MAX_GENERATED_TOKENS = 1 << 20
MAX_LISTED_TOKENS = 4096
"""Most tokens that one option may list: biased, allowed, banned."""
MAX_TOP_LOGPROBS = 64
MAX_BIAS = 1000.0
MAX_SPECULATIVE_TOKENS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Options of one generate request.

    They apply in the order of transformers' logits processors: logit bias, repetition penalty,
    presence and frequency penalty, allowed and banned tokens, temperature, top-k, top-p, min-p,
    typical-p. Penalties count the tokens that this request generated on its branch and, with
    `penalize_prompt`, those of the context before them as well.

    Raises:
        InvalidRequest: One or more options are out of range, or contradict each other; every
            violation is listed.
    """

    max_tokens: int = 256
    """Most tokens to generate, in [1, 1048576]."""
    min_tokens: int = 0
    """Tokens before which no token that ends generation is chosen, in [0, max_tokens]. Stop texts
    end it all the same."""
    temperature: float = 0.0
    """Divides the logits, in [0, 100]; 0 is greedy: no random number is drawn."""
    top_k: int | None = None
    """Keep the k most likely tokens, k >= 1; None keeps all."""
    top_p: float | None = None
    """Keep the smallest set of most likely tokens whose probability reaches p, in (0, 1]."""
    min_p: float | None = None
    """Drop tokens less likely than this times the most likely one, in [0, 1]."""
    typical_p: float | None = None
    """Keep the tokens whose surprise is closest to the expected one, until their probability
    reaches this, in (0, 1]: locally typical sampling (C. Meister et al., 2022)."""
    repetition_penalty: float = 1.0
    """Divides the positive logits of counted tokens and multiplies the negative ones, in
    (0, 100]: CTRL (N. S. Keskar et al., 2019). 1 changes nothing."""
    presence_penalty: float = 0.0
    """Subtracted from the logits of counted tokens, in [-100, 100]."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit once for each time it was counted, in [-100, 100]."""
    penalize_prompt: bool = False
    """Whether penalties count the tokens before the request too, not only generated ones."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """Pairs of a token id and what is added to its logit, in [-1000, 1000]; at most 4096."""
    allowed_token_ids: tuple[int, ...] = ()
    """The only tokens that may be chosen, at most 4096; empty allows all."""
    banned_token_ids: tuple[int, ...] = ()
    """Tokens that are never chosen, at most 4096."""
    seed: int | None = None
    """Names the random stream, in [0, 2**63); None draws one and reports it."""
    stop: tuple[str, ...] = ()
    """Texts that end generation; their text is withheld from the stream, their tokens committed."""
    include_stop: bool = False
    """Whether the stop that ends generation is part of the text after all."""
    stop_token_ids: tuple[int, ...] = ()
    """Token ids that end generation; the id is committed, its text withheld."""
    ignore_eos: bool = False
    """Generate past the model's own end-of-sequence tokens."""
    logprobs: bool = False
    """Report the log-probability of each generated token, before every option here."""
    top_logprobs: int = 0
    """Report also the most likely tokens at each position, in [0, 64]; needs `logprobs`."""
    num_speculative_tokens: int | None = None
    """Most tokens that a step may guess ahead and check at once, in [0, 64]; 0 guesses none, None
    leaves it to the server. It changes how fast tokens come, and not which."""

    def __post_init__(self) -> None:
        violations = dict(_violations(self))
        if violations:
            listed = "; ".join(f"{field}: {what}" for field, what in violations.items())
            raise InvalidRequest(
                f"Sampling options are out of range: {listed}.", violations=violations
            )

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is taken without drawing a random number."""
        return self.temperature == 0.0 or self.top_k == 1

    @property
    def has_penalties(self) -> bool:
        """Whether a token's logit depends on how often it occurred."""
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )


class _Range(NamedTuple):
    """What one number must fulfil; None stands for an option that is off."""

    field: str
    holds: Callable[[float], bool]
    says: str


_RANGES = (
    _Range("max_tokens", lambda n: 1 <= n <= MAX_GENERATED_TOKENS, f"[1, {MAX_GENERATED_TOKENS}]"),
    _Range("min_tokens", lambda n: 0 <= n <= MAX_GENERATED_TOKENS, f"[0, {MAX_GENERATED_TOKENS}]"),
    _Range("temperature", lambda t: 0 <= t <= 100, "[0, 100]"),
    _Range("top_k", lambda k: k >= 1, "[1, 2**32)"),
    _Range("top_p", lambda p: 0 < p <= 1, "(0, 1]"),
    _Range("min_p", lambda p: 0 <= p <= 1, "[0, 1]"),
    _Range("typical_p", lambda p: 0 < p <= 1, "(0, 1]"),
    _Range("repetition_penalty", lambda p: 0 < p <= 100, "(0, 100]"),
    _Range("presence_penalty", lambda p: -100 <= p <= 100, "[-100, 100]"),
    _Range("frequency_penalty", lambda p: -100 <= p <= 100, "[-100, 100]"),
    _Range("seed", lambda n: 0 <= n < MAX_SEED, "[0, 2**63)"),
    _Range("top_logprobs", lambda n: 0 <= n <= MAX_TOP_LOGPROBS, f"[0, {MAX_TOP_LOGPROBS}]"),
    _Range(
        "num_speculative_tokens",
        lambda n: 0 <= n <= MAX_SPECULATIVE_TOKENS,
        f"[0, {MAX_SPECULATIVE_TOKENS}]",
    ),
)  # NaN is in no range: it compares with nothing

SIZES = {
    "stop": MAX_STOPS,
    "stop_token_ids": MAX_STOPS,
    "logit_bias": MAX_LISTED_TOKENS,
    "allowed_token_ids": MAX_LISTED_TOKENS,
    "banned_token_ids": MAX_LISTED_TOKENS,
}
"""Most entries of each list: what is longer is refused without looking at it."""


def _violations(params: SamplingParams) -> Iterator[tuple[str, str]]:
    for field, holds, says in _RANGES:
        value = getattr(params, field)
        if value is not None and not holds(value):
            yield field, f"must be in {says}, got {value}"
    too_long = {name for name, most in SIZES.items() if len(getattr(params, name)) > most}
    for name in sorted(too_long):
        yield name, f"takes at most {SIZES[name]} entries"
    for name in ("stop_token_ids", "allowed_token_ids", "banned_token_ids"):
        if name not in too_long and any(token < 0 for token in getattr(params, name)):
            yield name, "must not be negative"
    if "stop" not in too_long and not all(0 < len(t) <= MAX_STOP_CHARACTERS for t in params.stop):
        yield "stop", f"takes texts of 1 to {MAX_STOP_CHARACTERS} characters"
    if "logit_bias" not in too_long and (what := _wrong_bias(params.logit_bias)):
        yield "logit_bias", what
    yield from _contradictions(params, too_long)


def _wrong_bias(pairs: tuple[tuple[int, float], ...]) -> str | None:
    if any(token < 0 for token, _ in pairs):
        return "must not name a negative token"
    if not all(math.isfinite(bias) and abs(bias) <= MAX_BIAS for _, bias in pairs):
        return f"takes biases in [-{MAX_BIAS:.0f}, {MAX_BIAS:.0f}]"
    if len({token for token, _ in pairs}) < len(pairs):
        return "names a token twice"
    return None


def _contradictions(params: SamplingParams, too_long: set[str]) -> Iterator[tuple[str, str]]:
    if params.max_tokens >= 1 and params.min_tokens > params.max_tokens:
        yield "min_tokens", f"must not exceed max_tokens, {params.max_tokens}"
    if params.top_logprobs > 0 and not params.logprobs:
        yield "top_logprobs", "needs logprobs"
    if not {"allowed_token_ids", "banned_token_ids"} & too_long:
        both = set(params.allowed_token_ids).intersection(params.banned_token_ids)
        if both:
            yield "banned_token_ids", f"bans {len(both)} tokens that allowed_token_ids allows"
