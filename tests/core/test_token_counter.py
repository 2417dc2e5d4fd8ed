"""Counts of tokens: what the tokens say, whatever happened on the way."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from agentkv.core.token_counter import TokenCounter

TOKENS = st.lists(st.integers(0, 12))


def counted(counter: TokenCounter) -> dict[int, int]:
    snapshot = counter.snapshot()
    assert len(set(snapshot.token_ids)) == len(snapshot.token_ids), "a token is listed once"
    return dict(zip(snapshot.token_ids, snapshot.counts, strict=True))


@given(before=TOKENS, mine=TOKENS, its=TOKENS)
def test_case_065_counts_fork_by_value(before: list[int], mine: list[int], its: list[int]) -> None:
    """Catches counts that siblings share, and a token that is lost or counted twice."""
    counter = TokenCounter(before)
    twin = counter.fork()
    for token in mine:
        counter.add(token)
    for token in its:
        twin.add(token)
    assert counted(counter) == Counter(before + mine)
    assert counted(twin) == Counter(before + its)


def test_a_snapshot_stays_as_it_was() -> None:
    """Catches a step that sees tokens committed after it was planned."""
    counter = TokenCounter([3, 3])
    snapshot = counter.snapshot()
    counter.add(3)
    counter.add(4)
    assert (list(snapshot.token_ids), list(snapshot.counts)) == ([3], [2])
