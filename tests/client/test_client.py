"""The blocking client's verbs, over a real connection."""

import copy
import pickle
from datetime import UTC, datetime
from typing import Any

import pytest
from client.fake_service import FakeService, Fault

from agentkv import (
    AgentKVError,
    Bill,
    Client,
    ContextInfo,
    ContextMoved,
    FinishReason,
    InvalidRequest,
    LeaseInfo,
    LeaseMode,
    NotFound,
    PressureLevel,
    QuotaInfo,
    Residency,
    Tier,
    TierUsage,
    Usage,
)


def test_create_shows_the_whole_context(client: Client) -> None:
    """Catches a field of the answer that the SDK drops or mixes up."""
    root = client.create("hello", labels={"plan": "a"})
    assert root.info == ContextInfo(
        id=root.id,
        parent_id=None,
        fork_position=0,
        root_id=root.id,
        depth=0,
        length=5,
        num_computed_tokens=5,
        private_blocks=1,
        host_blocks=0,
        disk_blocks=0,
        shared_blocks=0,
        residency=Residency.DEVICE,
        pinned=False,
        has_head_logits=False,
        busy=False,
        num_children=0,
        labels={"plan": "a"},
        create_time=datetime.fromtimestamp(1_700_000_000, UTC),
        reclaimable_blocks=1,
        lease=LeaseInfo(LeaseMode.RETAIN, 60.0, datetime.fromtimestamp(1_700_000_060, UTC)),
    )
    assert root.usage == client.usage == Usage(computed_tokens=4, cached_tokens=1)
    assert client.pool is not None
    assert client.pool.total_blocks == 64


def test_create_takes_each_form_of_prompt(client: Client, service: FakeService) -> None:
    """Catches a prompt sent in another form than it was given."""
    client.create("ab", allow_special=True)
    client.create(token_ids=range(3))
    client.create(messages=[{"role": "user", "content": "Hi"}], add_generation_prompt=False)
    texts, ids, chat = service.requests("Create")
    assert (texts.text, texts.allow_special) == ("ab", True)
    assert list(ids.token_ids.ids) == [0, 1, 2]
    assert [(turn.role, turn.content) for turn in chat.messages.messages] == [("user", "Hi")]
    assert chat.messages.HasField("add_generation_prompt")
    assert not chat.messages.add_generation_prompt


@pytest.mark.parametrize(
    "prompt",
    [
        {},
        {"text": "a", "token_ids": [1]},
        {"text": "half \ud800 a character"},
        {"token_ids": [-1]},
        {"token_ids": [2**32]},
        {"messages": [{"role": "user", "content": "Hi", "name": "Ann"}]},
        {"text": ""},
        {"text": "a", "timeout": 0.0},
        {"text": "a", "timeout": float("inf")},
    ],
)
def test_bad_prompts_are_refused(client: Client, prompt: dict[str, Any]) -> None:
    """Catches a bad argument that is ignored, or raised as something other than our error."""
    with pytest.raises(InvalidRequest):
        client.create(**prompt)


def test_a_list_in_place_of_a_text_says_what_to_write(client: Client) -> None:
    """Catches protobuf's own message, which names neither the argument nor the remedy."""
    ids: Any = [1, 2]
    with pytest.raises(TypeError, match="token_ids="):
        client.create("ab").extend(ids)


def test_fork_makes_a_group(client: Client, service: FakeService) -> None:
    """Catches branches that do not know their position, or a group that is no sequence."""
    root = client.create("abcdefgh")
    branches = root.fork(3, at=4, labels={"kind": "probe"})
    assert [branch.length for branch in branches] == [4, 4, 4]
    assert branches[0].info.parent_id == root.id
    assert branches[-1].info.labels == {"kind": "probe"}
    assert len(branches[1:]) == 2
    assert root.fork_one().length == 8


def test_fork_at_zero_is_sent(client: Client, service: FakeService) -> None:
    """Catches position 0 taken for no position."""
    assert client.create("abc").fork_one(at=0).length == 0
    assert client.create("abc").fork_one().length == 3


def test_extend_tracks_the_length(client: Client, service: FakeService) -> None:
    """Catches a handle that sends a stale expected length after its own call."""
    root = client.create("abc")
    first = root.extend("de", logprobs=True)
    second = root.extend(token_ids=[1], allow_special=True)
    assert (first.length, first.logprobs) == (5, (-0.5, -0.5))
    assert (second.length, second.logprobs) == (6, ())
    assert [request.expected_length for request in service.requests("Extend")] == [3, 5]
    assert root.length == 6
    assert root.usage.computed_tokens == 5


def test_another_handles_change_is_noticed(client: Client) -> None:
    """Catches two agents that write on one context without either knowing."""
    root = client.create("abc")
    client.attach(root.id).extend("d")
    with pytest.raises(ContextMoved) as caught:
        root.extend("e")
    assert caught.value.actual_length == 4
    assert root.length == 3
    assert root.refresh().length == 4
    assert root.extend("e").length == 5


def test_score_totals_and_means(client: Client) -> None:
    """Catches scores in the wrong order, or a mean over the wrong number of tokens."""
    scores = client.create("abc").score(["xy", [1, 2, 3, 4]])
    assert [score.token_ids for score in scores] == [(120, 121), (1, 2, 3, 4)]
    assert [score.total for score in scores] == [-1.0, -2.0]
    assert [score.mean for score in scores] == [-0.5, -0.5]


def test_the_likeliest_continuation_is_chosen(client: Client) -> None:
    """Catches a choice by the wrong measure, or of an index into another list."""
    root = client.create("abc")
    continuations: list[str | list[int]] = [[1, 2, 3], "x", [4, 5]]  # half a nat for each token
    by_total = root.choose(continuations, by_mean=False)
    assert (by_total.index, by_total.score.total) == (1, -0.5)
    by_mean = root.choose(continuations)
    assert (by_mean.index, len(by_mean.scores)) == (0, 3)  # all are equal: the first
    assert root.length == 3


def test_the_prompts_logprobs_are_kept_with_the_handle(client: Client) -> None:
    """Catches an answer of Create that nobody can read."""
    assert client.create("abc", logprobs=True).prompt_logprobs == (-0.25, -0.25)
    assert client.create("abc").prompt_logprobs == ()


def test_scoring_one_bare_text_is_refused(client: Client) -> None:
    """Catches a text scored letter by letter, as a list of texts."""
    with pytest.raises(InvalidRequest, match="list"):
        client.create("abc").score("no")


def test_truncate_takes_over_the_length(client: Client) -> None:
    """Catches a handle that believes in dropped tokens."""
    root = client.create("abcdef")
    assert root.truncate(2).length == root.length == 2
    assert root.extend("x").length == 3


def test_tokens_can_be_read_back(client: Client) -> None:
    """Catches a reading that ends with the first page, or starts in the wrong place."""
    root = client.create("abcdefghij")
    assert bytes(root.read_tokens()) == b"abcdefghij"
    assert bytes(root.read_tokens(3)) == b"defghij"
    assert root.read_tokens(10) == []
    with pytest.raises(InvalidRequest):
        root.read_tokens(-1)


def test_list_fetches_every_page(client: Client) -> None:
    """Catches a listing that ends with the first page."""
    root, other = client.create("a"), client.create("b")
    branches = root.fork(4)
    assert [item.id for item in client.list()] == [root.id, other.id, *(b.id for b in branches)]
    assert other.id not in {item.id for item in client.list(root.id)}


def test_server_info_is_read_in_full(client: Client) -> None:
    """Catches a part of the server's answer left at its default."""
    info = client.server_info()
    assert info.server_version == "9.8.7"
    assert info.api_versions == ("agentkv.v1",)
    assert (info.model.name, info.model.bytes_per_block) == ("alphabet", 2048)
    assert info.pool.block_size == 4
    assert (info.pool.host_total_blocks, info.pool.host_live_blocks) == (8, 3)
    assert (info.pool.disk_free_blocks, info.pool.level) == (2, PressureLevel.OK)
    assert info.limits.max_contexts == 100
    assert info.counters.num_forks == 3
    assert info.sampling_options == ("max_tokens",)


def test_attach_finds_or_fails(client: Client) -> None:
    """Catches a handle to nothing that fails at its first use only."""
    root = client.create("abc")
    assert client.attach(root.id).length == 3
    with pytest.raises(NotFound):
        client.attach("r1.nothing")


def test_copies_are_the_same_handle(client: Client, service: FakeService) -> None:
    """Catches a search library's deep copy that forks, or shares no length."""
    root = client.create("abc")
    tree = {"state": root, "children": [copy.copy(root)]}
    twin = copy.deepcopy(tree)
    assert twin["state"] is root
    assert twin["children"] == [root]
    assert service.requests("Fork") == []


def test_pickling_a_handle_says_what_to_do(client: Client) -> None:
    """Catches a pickled handle that comes back without a connection."""
    with pytest.raises(TypeError, match="attach"):
        pickle.dumps(client.create("abc"))


def test_a_closed_client_says_so(address: str) -> None:
    """Catches gRPC's ValueError in place of our error."""
    client = Client(address)
    client.close()
    client.close()
    with pytest.raises(InvalidRequest, match="closed"):
        client.create("abc")


def test_usage_sums_over_all_calls(client: Client) -> None:
    """Catches tokens that the client's total forgets: those of streams, branches or scores."""
    root = client.create("abcd")  # 3 computed, 1 cached
    root.extend("ef")  # 2
    root.complete(max_tokens=3)  # 3, generated 3
    root.complete_branches(2, max_tokens=5)  # 10, generated 10
    root.score(["x"])  # 1
    assert client.usage == Usage(computed_tokens=19, cached_tokens=1, generated_tokens=13)
    assert root.usage == Usage(computed_tokens=9, cached_tokens=1, generated_tokens=3)


def test_errors_show_their_request_id(client: Client, service: FakeService) -> None:
    """Catches an error report that cannot be matched with the server's log."""
    service.faults["Create"].append(Fault(InvalidRequest("No.", violations={"text": "bad"})))
    with pytest.raises(AgentKVError) as caught:
        client.create("abc")
    assert caught.value.request_id == service.requests("Create")[0].request_id
    assert caught.value.violations == {"text": "bad"}


def test_finish_reasons_are_ours(client: Client) -> None:
    """Catches a number of the wire shown in place of a reason."""
    completion = client.create("abc").complete(max_tokens=2)
    assert completion.finish_reason is FinishReason.LENGTH
    assert completion.seed == 7


def test_usage_is_read_in_full(client: Client) -> None:
    """Catches a number that is left out or read from another field, and a limit of 0 for none."""
    root = client.create("abc")
    for usage in (client.get_usage(), client.get_usage(root.id), root.get_usage()):
        assert usage.bill == Bill(11, 22, 33, 4, 5, 6.5, 7.5, 8.5, 9.5)
        assert usage.quotas == QuotaInfo(3, 40, 0.0, None, 60.0, 2, 8, 5, None)
        assert usage.tiers == (TierUsage(Tier.DEVICE, 10.0, 6.5, 3.5),)
        assert usage.num_contexts == 1
    root.release()
    with pytest.raises(NotFound):
        root.get_usage()
