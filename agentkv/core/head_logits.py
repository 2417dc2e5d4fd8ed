"""Logits after the last token of a segment, so that what is forked there recomputes nothing.

The logits are opaque here; the runner makes and reads them. A vector is as wide as the
vocabulary, so only the most recently used are kept: losing one costs one recomputed row.
"""

from collections import OrderedDict

from agentkv.core.segment import Segment

KEPT_HEADS = 256
"""Logits that a tree keeps unless told otherwise; who sizes a device's memory counts them too."""


class HeadLogits:
    """A bounded map from segment to the logits at its end."""

    def __init__(self, capacity: int) -> None:
        assert capacity >= 0
        self._capacity = capacity
        self._kept: OrderedDict[Segment, object] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def __contains__(self, segment: object) -> bool:
        return segment in self._kept

    def keep(self, segment: Segment, logits: object) -> None:
        """Keeps logits, dropping the least recently used ones over the capacity."""
        self._kept[segment] = logits
        self._kept.move_to_end(segment)
        while len(self._kept) > self._capacity:
            self._kept.popitem(last=False)

    def get(self, segment: Segment) -> object | None:
        """Finds the logits at a segment's end, or None."""
        if segment in self._kept:
            self._kept.move_to_end(segment)
        return self._kept.get(segment)

    def drop(self, segment: Segment) -> None:
        """Forgets the logits of a segment that grew, was cut or is gone."""
        self._kept.pop(segment, None)
