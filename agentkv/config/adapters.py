"""A LoRA adapter by name."""

import re
from dataclasses import dataclass

from agentkv.config.requirement import require

ADAPTER_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """A LoRA adapter that contexts may be created with."""

    name: str
    """As clients name it: 1 to 64 letters, digits, dots, hyphens and underscores."""
    path: str
    """Folder as PEFT saves it."""

    def __post_init__(self) -> None:
        require(
            ADAPTER_NAME.fullmatch(self.name) is not None,
            f"an adapter's name has 1 to 64 letters, digits, '.', '-' and '_'; got {self.name!r}.",
        )
