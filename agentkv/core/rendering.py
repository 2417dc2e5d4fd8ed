"""Which of a context's tokens a chat template wrote: a chain of values, the last call first.

It owns what of that stays true when a context is cut or forked. What was written is opaque here.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, eq=False)
class Rendering:
    """The first `end` tokens of a context are what a template made of some messages.

    What follows them, if anything, is the turn that the last call left open.
    """

    added: object
    """What the last call added; opaque here."""
    end: int
    previous: "Rendering | None" = field(default=None, repr=False)
    """What the context was before that call."""

    def __iter__(self) -> Iterator[object]:
        """Yields what each call added, oldest first."""
        calls = []
        link: Rendering | None = self
        while link is not None:
            calls.append(link.added)
            link = link.previous
        return reversed(calls)

    def at(self, position: int) -> "Rendering | None":
        """Finds what holds for a branch forked at a position, or cut to it."""
        link: Rendering | None = self
        while link is not None and link.end > position:
            link = link.previous
        return link
