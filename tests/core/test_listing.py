"""Pages of contexts: in order of creation, whole, and only on tokens that were given."""

import pytest
from bench import TENANT, Bench

from agentkv.errors import InvalidRequest


def test_pages_list_parents_first_and_each_context_once() -> None:
    """Catches an order by handle, which shows a child before its parent, and a lost context."""
    bench = Bench()
    root = bench.create([1, 2, 3])
    expected = [root]
    for _ in range(6):
        expected += bench.fork(expected[-1], count=2)
    found, token = [], ""
    while True:
        page = bench.engine.observer.list(TENANT, root_id=root, page_size=4, page_token=token)
        found += [context.id for context in page.contexts]
        token = page.next_page_token
        if not token:
            break
        assert len(page.contexts) == 4
    assert found == expected


def test_a_page_goes_on_after_its_last_context_was_released() -> None:
    """Catches a page token that dies with the context it names."""
    bench = Bench()
    ids = [bench.create([number]) for number in range(4)]
    first = bench.engine.observer.list(TENANT, page_size=2)
    bench.engine.contexts.release(TENANT, [ids[1]])
    rest = bench.engine.observer.list(TENANT, page_size=2, page_token=first.next_page_token)
    assert [context.id for context in rest.contexts] == ids[2:]
    assert rest.next_page_token == ""


@pytest.mark.parametrize("token", ["x", "-1", "1.5", "²"])
def test_a_foreign_token_is_refused(token: str) -> None:
    """Catches a list that silently starts again, or a crash in int()."""
    with pytest.raises(InvalidRequest):
        Bench().engine.observer.list(TENANT, page_token=token)
