"""What a request says of single tokens, in the form in which a step uses it.

Made once per request, so that a step copies arrays instead of reading lists. It knows no logits.
"""

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, replace

from agentkv.sampling_params import SamplingParams

BITS_PER_WORD = 32


@dataclass(frozen=True, slots=True)
class TokenRules:
    """Biases, bans and an allowed set; each may be empty."""

    biased_ids: "array[int]"
    biases: "array[float]"
    """One for each of `biased_ids`, added to its logit."""
    banned_ids: "array[int]"
    masks: tuple[bytes, ...] = ()
    """Sets of tokens that may be chosen, as `Sample.masks`."""

    @classmethod
    def of(cls, params: SamplingParams, vocab_size: int) -> "TokenRules | None":
        """Prepares the options of a request; None when they say nothing of single tokens."""
        if not (params.logit_bias or params.banned_token_ids or params.allowed_token_ids):
            return None
        allowed = params.allowed_token_ids
        return cls(
            biased_ids=array("I", (token for token, _ in params.logit_bias)),
            biases=array("f", (bias for _, bias in params.logit_bias)),
            banned_ids=array("I", params.banned_token_ids),
            masks=(mask_of(allowed, vocab_size),) if allowed else (),
        )

    @classmethod
    def banning(cls, rules: "TokenRules | None", token_ids: Iterable[int]) -> "TokenRules":
        """Bans more tokens than some rules do, if there are any."""
        rules = rules or cls(array("I"), array("f"), array("I"))
        return replace(rules, banned_ids=rules.banned_ids + array("I", token_ids))


def mask_of(token_ids: Iterable[int], vocab_size: int) -> bytes:
    """Writes a set of tokens as a bitmask: bit i of byte b stands for token 8 * b + i.

    Args:
        token_ids: Each in [0, vocab_size).
        vocab_size: Width of the logits.

    Returns:
        Whole words of 32 bits, little-endian: ceil(vocab_size / 32) of them.
    """
    mask = bytearray(-(-vocab_size // BITS_PER_WORD) * (BITS_PER_WORD // 8))
    for token in token_ids:
        mask[token >> 3] |= 1 << (token & 7)
    return bytes(mask)
