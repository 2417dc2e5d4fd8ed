"""What a server says about snapshots, and what a restore gives: frozen values."""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Generic, TypeVar

HandleT = TypeVar("HandleT")


@dataclass(frozen=True, slots=True)
class SnapshotInfo:
    """A saved context, or tree of contexts."""

    name: str
    create_time: datetime
    """When it was saved, by the server's clock, in UTC."""
    model_name: str
    """The model it was made with, as that server named it."""
    num_contexts: int
    num_tokens: int
    """Tokens in it, shared ones once."""
    num_kv_tokens: int
    """Those of them whose KV it holds."""
    num_bytes: int
    """Bytes on disk."""


@dataclass(frozen=True, slots=True)
class RestoredContexts(Generic[HandleT]):
    """The contexts that a restore made, parents before their children."""

    handles: tuple[HandleT, ...]
    saved_ids: tuple[str, ...]
    """Ids they had when they were saved, in the same order."""
    num_kv_tokens: int
    """Tokens whose KV is there, shared ones once; the next use computes the others."""
    kv_refusal: str
    """Why KV that the snapshot holds could not be used; empty when nothing spoke against it."""

    @property
    def root(self) -> HandleT:
        """The context that was saved by name: all others descend from it."""
        return self.handles[0]

    def find(self, saved_id: str) -> HandleT:
        """Finds a context by the id it had when it was saved.

        Raises:
            KeyError: None had it.
        """
        if saved_id not in self.saved_ids:
            raise KeyError(saved_id)
        return self.handles[self.saved_ids.index(saved_id)]

    def __len__(self) -> int:
        """Counts the contexts."""
        return len(self.handles)

    def __iter__(self) -> Iterator[HandleT]:
        """Iterates over the handles."""
        return iter(self.handles)
