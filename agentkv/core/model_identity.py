"""What tells one model from another: its config, every weight, its dtype and its tokenizer.

KV means something to the model that computed it alone, and tokens to its tokenizer alone. How a
fingerprint is taken is `agentkv.model.fingerprint`'s affair.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """The identity of a model; two are equal when KV and tokens may be exchanged."""

    architecture: str
    dtype: str
    config: str
    """Checksum of the config, as the model understands it."""
    weights: str
    """Checksum over all weights."""
    tokenizer: str
    """Checksum of the tokenizer."""

    def differences(self, other: "Fingerprint") -> list[str]:
        """Names what differs, in the order that matters."""
        names = ("architecture", "config", "weights", "dtype", "tokenizer")
        return [name for name in names if getattr(self, name) != getattr(other, name)]
