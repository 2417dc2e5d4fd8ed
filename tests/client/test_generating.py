"""Streams of the blocking client: whole, cut, closed early."""

from typing import Any

import pytest
from client.fake_service import FakeService, Fault, Hang

from agentkv import (
    BranchFinish,
    Cancelled,
    Chunk,
    Client,
    ContextBusy,
    DeadlineExceeded,
    FinishReason,
    InternalError,
    InvalidRequest,
    PoolExhausted,
    Unavailable,
)


def test_a_stream_yields_chunks_and_then_everything(client: Client) -> None:
    """Catches a chunk lost between stream and result, or a length that lags behind."""
    root = client.create("abc")
    lengths = []
    with root.generate(max_tokens=4, logprobs=True) as stream:
        chunks = []
        for chunk in stream:
            chunks.append(chunk)
            lengths.append(root.length)
        completion = stream.result()
    assert [chunk.text for chunk in chunks] == ["d", "e", "f", "g"]
    assert chunks[0] == Chunk(0, (100,), "d", (-0.25,))
    assert lengths == [4, 5, 6, 7]
    assert (completion.text, completion.token_ids) == ("defg", (100, 101, 102, 103))
    assert completion.total_logprob == -1.0
    assert completion.usage.generated_tokens == 4
    assert root.info.length == root.length == 7


def test_options_reach_the_server(client: Client, service: FakeService) -> None:
    """Catches an option that is dropped on the way: the most silent of faults."""
    client.create("abc").complete(
        max_tokens=1,
        temperature=0.5,
        top_k=3,
        top_p=0.9,
        min_p=0.1,
        seed=2**62,
        stop="END",
        stop_token_ids=[5, 6],
        ignore_eos=True,
        logprobs=True,
        typical_p=0.8,
        repetition_penalty=1.25,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        penalize_prompt=True,
        logit_bias={7: 1.5, 3: -2.0},
        allowed_token_ids=[1, 2],
        banned_token_ids=[3],
        min_tokens=1,
        top_logprobs=2,
    )
    sampling = service.requests("Generate")[0].sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_k) == (1, 0.5, 3)
    assert (sampling.top_p, sampling.min_p, sampling.seed) == (0.9, 0.1, 2**62)
    assert list(sampling.stop) == ["END"]
    assert list(sampling.stop_token_ids) == [5, 6]
    assert (sampling.ignore_eos, sampling.logprobs) == (True, True)
    assert (sampling.typical_p, sampling.repetition_penalty) == (0.8, 1.25)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (0.5, -0.5)
    assert (sampling.penalize_prompt, dict(sampling.logit_bias)) == (True, {7: 1.5, 3: -2.0})
    assert (list(sampling.allowed_token_ids), list(sampling.banned_token_ids)) == ([1, 2], [3])
    assert (sampling.min_tokens, sampling.top_logprobs) == (1, 2)


def test_options_not_given_are_not_sent(client: Client, service: FakeService) -> None:
    """Catches a default sent as a choice: an older server would refuse an option it lacks."""
    client.create("abc").complete(max_tokens=1)
    sampling = service.requests("Generate")[0].sampling
    assert not any(sampling.HasField(name) for name in ("top_k", "top_p", "min_p", "seed"))


def test_wrong_options_are_refused_before_anything_is_sent(
    client: Client, service: FakeService
) -> None:
    """Catches a misspelt option ignored in silence."""
    root = client.create("abc")
    misspelt: Any = {"max_token": 3}
    with pytest.raises(InvalidRequest) as caught:
        root.generate(max_tokens=0, top_p=2.0)
    assert set(caught.value.violations) == {"max_tokens", "top_p"}
    with pytest.raises(InvalidRequest):
        root.generate(top_k=2**40)
    with pytest.raises(TypeError, match="max_token"):
        root.generate(**misspelt)
    assert service.requests("Generate") == []


def test_streams_run_side_by_side(client: Client, service: FakeService) -> None:
    """Catches streams that begin when they are read: eight would take eight times as long."""
    branches = client.create("abc").fork(3)
    streams = [branch.generate(max_tokens=2) for branch in branches]
    assert [stream.result().text for stream in reversed(streams)] == ["de"] * 3


def test_closing_early_leaves_the_rest_to_the_server(client: Client, service: FakeService) -> None:
    """Catches a stream that runs on after its block, and a next call with a stale length."""
    root = client.create("abc")
    service.faults["Generate"].append(Hang(after_messages=2))
    with root.generate(max_tokens=9) as stream:
        assert next(stream).text == "d"
        assert stream.text_so_far == "d"
        assert stream.token_ids_so_far == (100,)
        assert service.hangs.wait(5)
    assert service.was_cancelled.wait(5)
    assert list(stream) == []
    with pytest.raises(Cancelled):
        stream.result()
    assert root.extend("x").length == 6  # the second token was committed, though never read
    assert len(service.requests("Get")) == 1
    assert root.complete(max_tokens=1).text == "g"


def test_a_next_stream_learns_the_length_first(client: Client, service: FakeService) -> None:
    """Catches a stream opened with the length of before an early close."""
    root = client.create("abc")
    service.faults["Generate"].append(Hang(after_messages=2))
    with root.generate(max_tokens=9) as stream:
        next(stream)
        assert service.hangs.wait(5)
    assert root.generate(max_tokens=1).result().text == "f"
    assert [request.expected_length for request in service.requests("Generate")] == [3, 5]


def test_a_context_still_busy_with_a_closed_stream_is_waited_for(
    client: Client, service: FakeService
) -> None:
    """Catches a refusal that the caller's own earlier stream causes."""
    root = client.create("abc")
    service.faults["Generate"].append(Hang(after_messages=1))
    with root.generate(max_tokens=9) as stream:
        next(stream)
        assert service.hangs.wait(5)
    service.contexts[root.id].num_busy_looks = 2
    assert root.truncate(1).length == 1
    assert len(service.requests("Get")) == 3
    service.contexts[root.id].num_busy_looks = 99
    with root.generate(max_tokens=1) as stream:  # closed before anything was read
        pass
    with pytest.raises(ContextBusy):
        root.extend("x")


def test_a_cut_stream_keeps_what_was_read(client: Client, service: FakeService) -> None:
    """Catches tokens generated twice, or a failure that looks like the end."""
    root = client.create("abc")
    service.faults["Generate"].append(Fault(Unavailable("gone"), after_messages=2))
    stream = root.generate(max_tokens=9)
    assert [next(stream).text, next(stream).text] == ["d", "e"]
    with pytest.raises(Unavailable):
        next(stream)
    assert list(stream) == []
    with pytest.raises(Unavailable):
        stream.result()
    assert stream.text_so_far == "de"
    assert root.length == 5
    assert len(service.requests("Generate")) == 1
    assert root.complete(max_tokens=1).text == "f"


def test_a_stream_without_a_finish_is_an_error(client: Client, service: FakeService) -> None:
    """Catches a truncated answer taken for a whole one."""
    service.ends_early = True
    with pytest.raises(InternalError):
        client.create("abc").complete(max_tokens=2)


def test_a_released_context_ends_its_stream(client: Client, service: FakeService) -> None:
    """Catches a finish without a context that breaks the handle."""
    root = client.create("abc")
    stream = root.generate_branches(1, max_tokens=1)
    next(stream)
    del service.contexts[stream.contexts[0].id]
    (branch,) = stream.result()
    assert branch.completion.finish_reason is FinishReason.LENGTH
    branch.context.release()


def test_a_deadline_ends_the_stream(client: Client, service: FakeService) -> None:
    """Catches a stream that waits for ever."""
    service.faults["Generate"].append(Hang(after_messages=1))
    stream = client.create("abc").generate(max_tokens=9, timeout=0.05)
    with pytest.raises(DeadlineExceeded):
        stream.result()
    assert stream.text_so_far == "d"


def test_branches_are_generated_in_one_call(client: Client, service: FakeService) -> None:
    """Catches branches mixed up, or contexts that do not know their new length."""
    root = client.create("abc")
    branches = root.complete_branches(3, at=2, max_tokens=2, labels={"kind": "plan"})
    assert [branch.text for branch in branches] == ["cd"] * 3
    assert [branch.completion.seed for branch in branches] == [7, 8, 9]
    assert [branch.context.length for branch in branches] == [4, 4, 4]
    assert branches[1].context.extend("x").length == 5
    assert root.length == 3
    (request,) = service.requests("GenerateBranches")
    assert (request.count, request.at, dict(request.labels)) == (3, 2, {"kind": "plan"})


def test_branch_events_name_their_branch(client: Client) -> None:
    """Catches events that cannot be told apart, or contexts known too late to be shown."""
    with client.create("abc").generate_branches(2, max_tokens=2) as stream:
        assert len(stream.contexts) == 0
        events = []
        for event in stream:
            events.append((type(event).__name__, event.branch))
            assert len(stream.contexts) == 2
            assert stream.contexts is stream.contexts
            if isinstance(event, BranchFinish):
                assert event.completion.text == "de"
    assert events == [
        *[("Chunk", 0), ("Chunk", 1)] * 2,
        ("BranchFinish", 0),
        ("BranchFinish", 1),
    ]


def test_one_failed_branch_leaves_the_others(client: Client) -> None:
    """Catches a branch's failure that ends the stream, or is passed over."""
    branches = client.create("abc").complete_branches(2, max_tokens=1, labels={"fails": "1"})
    assert branches[0].completion.error is None
    error = branches[1].completion.error
    assert branches[1].completion.finish_reason is FinishReason.ERROR
    assert isinstance(error, PoolExhausted)
    assert error.metadata == {"need": "3"}
    assert error.retry_after == 1.5


def test_branches_of_a_closed_stream_live_on(client: Client, service: FakeService) -> None:
    """Catches branches whose next call is refused after their stream was closed early."""
    service.faults["GenerateBranches"].append(Hang(after_messages=2))
    with client.create("abc").generate_branches(2, max_tokens=9) as stream:
        next(stream)
        assert service.hangs.wait(5)
    assert [branch.extend("x").length for branch in stream.contexts] == [5, 5]
    assert len(service.requests("Get")) == 2


def test_forking_is_never_repeated_inside_a_stream(client: Client, service: FakeService) -> None:
    """Catches a retry that leaves the branches of the first attempt behind."""
    service.faults["GenerateBranches"].append(Fault(Unavailable("gone"), is_late=False))
    with pytest.raises(Unavailable):
        client.create("abc").complete_branches(2, max_tokens=1)
    assert len(service.requests("GenerateBranches")) == 1
