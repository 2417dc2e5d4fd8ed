"""Who releases what, when, and in which order."""

import pytest
from client.fake_service import FakeService, Fault

from agentkv import Client, ContextLost, Released, RetryPolicy, Unavailable


def released(service: FakeService) -> list[str]:
    """Lists the handles that were released, in order."""
    return [id for request in service.requests("Release") for id in request.context_ids]


def test_leaving_a_with_releases_the_newest_first(client: Client, service: FakeService) -> None:
    """Catches branches that outlive the block they were made in, or a parent released first."""
    with client.create("abc") as root:
        first, second = root.fork(2)
        below = first.fork_one()
        generated = root.complete_branches(1, max_tokens=1)[0].context
    assert released(service) == [generated.id, second.id, below.id, first.id, root.id]
    assert len(service.requests("Release")) == 1
    assert service.contexts == {}


def test_groups_release_themselves_only(client: Client, service: FakeService) -> None:
    """Catches a group that takes its parent along, or forgets what hangs below it."""
    root = client.create("abc")
    with root.fork(2) as (first, second):
        below = first.fork_one()
    assert released(service) == [second.id, below.id, first.id]
    assert list(service.contexts) == [root.id]


def test_an_empty_group_sends_nothing(client: Client, service: FakeService) -> None:
    """Catches a call with no handles, which the server refuses."""
    with client.create("abc").generate_branches(1, max_tokens=1) as stream, stream.contexts:
        pass
    assert service.requests("Release") == []


def test_detached_contexts_stay(client: Client, service: FakeService) -> None:
    """Catches a kept branch that is released with its siblings."""
    with client.create("abc") as root:
        kept, other = root.fork(2)
        below = kept.fork_one()
        assert kept.detach() is kept
        late = kept.fork_one()
    assert released(service) == [other.id, late.id, below.id, root.id]
    assert kept.extend("d").length == 4


def test_releasing_twice_is_fine(client: Client, service: FakeService) -> None:
    """Catches a second release that fails, or that is sent at all."""
    with client.create("abc") as root:
        child = root.fork_one()
        assert root.release() == Released(num_released=1)
        assert root.release() == Released()
    assert released(service) == [root.id, child.id]


def test_recursive_release_forgets_what_is_below(client: Client, service: FakeService) -> None:
    """Catches branches that the server released and the client releases again."""
    with client.create("abc") as root:
        root.fork(2)
        root.release(recursive=True)
    (request,) = service.requests("Release")
    assert request.recursive


def test_what_is_gone_already_is_passed_over(client: Client, service: FakeService) -> None:
    """Catches a block that fails at its end because the server has restarted."""
    service.faults["Release"].append(Fault(ContextLost("Restarted.")))
    with client.create("abc") as root:
        service.contexts.clear()
    with client.create("abc"):
        service.contexts.clear()
    assert released(service)[0] == root.id


def test_closing_the_client_releases_the_rest(address: str, service: FakeService) -> None:
    """Catches contexts that leak when a program ends, or attached ones that are taken away."""
    with Client(address) as other:
        theirs = other.create("theirs").detach()
    with Client(address) as client:
        root = client.create("abc")
        child = root.fork_one()
        kept = client.create("kept").detach()
        client.attach(theirs.id)
    assert released(service) == [child.id, root.id]
    assert set(service.contexts) == {theirs.id, kept.id}


def test_an_attached_context_is_released_by_its_own_with(
    client: Client, service: FakeService
) -> None:
    """Catches a with-statement that does nothing."""
    root = client.create("abc").detach()
    with client.attach(root.id):
        pass
    assert released(service) == [root.id]


def test_a_failing_release_does_not_hide_the_cause(address: str, service: FakeService) -> None:
    """Catches an exception replaced by that of the clean-up."""
    with Client(address, retry=RetryPolicy(max_attempts=1)) as client:
        service.faults["Release"].extend([Fault(Unavailable("down")) for _ in range(2)])
        with pytest.raises(ZeroDivisionError) as caught, client.create("abc"):
            raise ZeroDivisionError
        assert "down" in caught.value.__notes__[0]
        with pytest.raises(Unavailable), client.create("abc"):
            pass


def test_many_contexts_are_released_in_several_calls(client: Client, service: FakeService) -> None:
    """Catches a release above the server's limit, which fails as a whole."""
    with client.create("abc") as root:
        root.fork(1_500)
    assert [len(request.context_ids) for request in service.requests("Release")] == [1000, 501]
    assert service.contexts == {}


def test_a_second_handle_of_a_context_does_not_lose_its_branches(
    client: Client, service: FakeService
) -> None:
    """Catches branches left on the server because an attached handle was released or detached."""
    root = client.create("abc")
    child = root.fork_one()
    other = client.attach(root.id)
    late = other.fork_one()
    other.release()
    client.close()
    assert {child.id, late.id, root.id} == set(released(service))
    assert service.contexts == {}
