"""How the next token is chosen and when to stop: one frozen value, checked once.

It knows no model: what depends on the vocabulary is checked where the vocabulary is known.
"""

import math
from dataclasses import dataclass

from agentkv.errors import InvalidRequest

MAX_SEED = 2**63  # exclusive
MAX_STOPS = 64
MAX_STOP_CHARACTERS = 1024
MAX_GENERATED_TOKENS = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Options of one generate request.

    Raises:
        InvalidRequest: One or more options are out of range; every violation is listed.
    """

    max_tokens: int = 256
    """Most tokens to generate, in [1, 1048576]."""
    temperature: float = 0.0
    """Divides the logits, in [0, 100]; 0 is greedy: no random number is drawn."""
    top_k: int | None = None
    """Keep the k most likely tokens, k >= 1; None keeps all."""
    top_p: float | None = None
    """Keep the smallest set of most likely tokens whose probability reaches p, in (0, 1]."""
    min_p: float | None = None
    """Drop tokens less likely than this times the most likely one, in [0, 1]."""
    seed: int | None = None
    """Names the random stream, in [0, 2**63); None draws one and reports it."""
    stop: tuple[str, ...] = ()
    """Texts that end generation; their text is withheld from the stream, their tokens committed."""
    stop_token_ids: tuple[int, ...] = ()
    """Token ids that end generation; the id is committed, its text withheld."""
    ignore_eos: bool = False
    """Generate past the model's own end-of-sequence tokens."""
    logprobs: bool = False
    """Report the log-probability of each generated token, before temperature and filters."""

    def __post_init__(self) -> None:
        violations = dict(self._violations())
        if violations:
            listed = "; ".join(f"{field}: {what}" for field, what in violations.items())
            raise InvalidRequest(
                f"Sampling options are out of range: {listed}.", violations=violations
            )

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is taken without drawing a random number."""
        return self.temperature == 0.0 or self.top_k == 1

    def _violations(self) -> list[tuple[str, str]]:
        checks: list[tuple[str, bool, str]] = [
            (
                "max_tokens",
                1 <= self.max_tokens <= MAX_GENERATED_TOKENS,
                f"must be in [1, {MAX_GENERATED_TOKENS}], got {self.max_tokens}",
            ),
            (
                "temperature",
                math.isfinite(self.temperature) and 0 <= self.temperature <= 100,
                f"must be in [0, 100], got {self.temperature}",
            ),
            (
                "top_k",
                self.top_k is None or self.top_k >= 1,
                f"must be at least 1, got {self.top_k}",
            ),
            (
                "top_p",
                self.top_p is None or 0 < self.top_p <= 1,
                f"must be in (0, 1], got {self.top_p}",
            ),
            (
                "min_p",
                self.min_p is None or 0 <= self.min_p <= 1,
                f"must be in [0, 1], got {self.min_p}",
            ),
            (
                "seed",
                self.seed is None or 0 <= self.seed < MAX_SEED,
                f"must be in [0, 2**63), got {self.seed}",
            ),
            (
                "stop",
                len(self.stop) <= MAX_STOPS
                and all(0 < len(text) <= MAX_STOP_CHARACTERS for text in self.stop),
                f"takes at most {MAX_STOPS} texts of 1 to {MAX_STOP_CHARACTERS} characters",
            ),
            (
                "stop_token_ids",
                len(self.stop_token_ids) <= MAX_STOPS
                and all(token >= 0 for token in self.stop_token_ids),
                f"takes at most {MAX_STOPS} token ids, none negative",
            ),
        ]
        return [(field, what) for field, holds, what in checks if not holds]
