"""Which logits are kept, and which go first."""

from array import array

from agentkv.core.head_logits import HeadLogits
from agentkv.core.segment import Segment


def segments(count: int) -> list[Segment]:
    """Segments that differ; their content does not matter here."""
    return [Segment(number, 0, array("I"), None) for number in range(count)]


def test_least_recently_used_logits_go_first() -> None:
    """Catches a table that grows without bound, or drops what was used last."""
    heads = HeadLogits(2)
    a, b, c = segments(3)
    heads.keep(a, "A")
    heads.keep(b, "B")
    assert heads.get(a) == "A"
    heads.keep(c, "C")
    assert b not in heads and heads.get(b) is None
    assert (heads.get(a), heads.get(c), len(heads)) == ("A", "C", 2)
    heads.keep(a, "new")
    assert heads.get(a) == "new" and len(heads) == 2


def test_drop() -> None:
    """Catches logits that outlive the token they follow; dropping none is no error."""
    heads = HeadLogits(2)
    a, b = segments(2)
    heads.keep(a, "A")
    heads.drop(a)
    heads.drop(b)
    assert a not in heads and len(heads) == 0


def test_capacity_of_none() -> None:
    """Catches a capacity of 0 that keeps one."""
    heads = HeadLogits(0)
    (a,) = segments(1)
    heads.keep(a, "A")
    assert len(heads) == 0
