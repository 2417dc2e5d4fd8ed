"""Each method of the service, over a real connection."""

import pytest
from server.fake_engine import FakeEngine
from server.harness import Served, failure_of, run, serving

from agentkv import errors
from agentkv.errors import Reason
from agentkv.v1 import agentkv_pb2 as pb


def tokens(*ids: int) -> pb.TokenIds:
    return pb.TokenIds(ids=ids)


async def created(served: Served, *ids: int) -> str:
    """Creates a context of some tokens and returns its handle."""
    answer = await served.stub.Create(pb.CreateRequest(token_ids=tokens(*(ids or (1, 2, 3)))))
    return str(answer.context.id)


def test_create_answers_every_field_of_a_context() -> None:
    """Catches a field of the view that is not copied to the wire."""

    async def scenario() -> None:
        async with serving() as served:
            answer = await served.stub.Create(
                pb.CreateRequest(token_ids=tokens(1, 2, 3), labels={"plan": "a"})
            )
            context = answer.context
            assert context.id == context.root_id == "c0"
            assert not context.HasField("parent_id")
            assert (context.length, context.num_computed_tokens) == (3, 2)
            assert (context.private_blocks, context.shared_blocks) == (1, 2)
            assert context.residency == pb.RESIDENCY_DEVICE
            assert context.has_head_logits
            assert dict(context.labels) == {"plan": "a"}
            assert context.create_time.ToNanoseconds() == 1_700_000_000_500_000_000
            assert answer.usage.computed_tokens == 3
            pool = answer.pool
            assert pool.total_blocks == pool.free_blocks + pool.live_blocks + pool.cached_blocks
            assert (pool.pinned_blocks, pool.block_size, pool.used_slots) == (2, 16, 300)

    run(scenario())


def test_labels_arrive_in_one_order() -> None:
    """Catches a repeat taken for another body because its map was written in another order."""

    async def scenario() -> None:
        async with serving() as served:
            names = [f"label {number}" for number in range(9)]
            for order in (names, names[::-1]):
                request = pb.CreateRequest(text="a", labels=dict.fromkeys(order, "v"))
                answer = await served.stub.Create(request)
                assert list(served.engine.contexts[answer.context.id].labels) == names

    run(scenario())


@pytest.mark.parametrize(
    ("request_", "expected"),
    [
        (pb.CreateRequest(text="hi"), [256, *b"hi"]),
        (pb.CreateRequest(text="<special>"), [256, *b"<special>"]),
        (pb.CreateRequest(text="<special>", allow_special=True), [256, 257]),
        (
            pb.CreateRequest(
                messages=pb.ChatMessages(messages=[pb.ChatMessage(role="user", content="hi")])
            ),
            [256, *b"user:hi\nassistant:"],
        ),
        (
            pb.CreateRequest(
                messages=pb.ChatMessages(
                    messages=[pb.ChatMessage(role="user", content="hi")],
                    add_generation_prompt=False,
                )
            ),
            [256, *b"user:hi\n"],
        ),
        (pb.CreateRequest(text="y" * 4000), [256, *b"y" * 4000]),
    ],
    ids=["text", "special stays text", "special", "chat", "chat without opening", "long text"],
)
def test_prompts_become_tokens(request_: pb.CreateRequest, expected: list[int]) -> None:
    """Catches text tokenised by the wrong rule, or special tokens made of a user's text."""

    async def scenario() -> None:
        async with serving() as served:
            answer = await served.stub.Create(request_)
            assert served.engine.contexts[answer.context.id].tokens == expected

    run(scenario())


def test_fork_makes_branches_at_a_position() -> None:
    """Catches a count, a position or labels lost on the way; position 0 is not `the head`."""

    async def scenario() -> None:
        async with serving() as served:
            root = await created(served)
            at_head = await served.stub.Fork(pb.ForkRequest(context_id=root))
            assert [context.length for context in at_head.contexts] == [3]
            assert at_head.pool.total_blocks == 64
            assert served.engine.calls[-2:] == ["create", "fork"]  # no second call for the pool
            at_start = await served.stub.Fork(
                pb.ForkRequest(context_id=root, count=2, at=0, labels={"k": "v"})
            )
            assert [context.length for context in at_start.contexts] == [0, 0]
            branch = at_start.contexts[1]
            assert (branch.parent_id, branch.root_id, branch.depth) == (root, root, 1)
            assert dict(branch.labels) == {"k": "v"}

    run(scenario())


def test_extend_appends_text_and_tokens() -> None:
    """Catches special tokens allowed without being asked, and log-probabilities lost."""

    async def scenario() -> None:
        async with serving() as served:
            root = await created(served)
            await served.stub.Extend(pb.ExtendRequest(context_id=root, text="<special>"))
            answer = await served.stub.Extend(
                pb.ExtendRequest(context_id=root, text="a<special>", allow_special=True)
            )
            assert served.engine.contexts[root].tokens == [1, 2, 3, *b"<special>", ord("a"), 257]
            assert answer.context.length == 14
            answer = await served.stub.Extend(
                pb.ExtendRequest(
                    context_id=root, token_ids=tokens(7, 8), expected_length=14, logprobs=True
                )
            )
            assert list(answer.logprobs) == [-0.5, -0.5]
            assert answer.pool.total_blocks == 64
            error = await failure_of(
                served.stub.Extend(
                    pb.ExtendRequest(context_id=root, token_ids=tokens(7), expected_length=0)
                )
            )
            assert isinstance(error, errors.ContextMoved)
            assert error.actual_length == 16

    run(scenario())


def test_the_most_likely_tokens_come_with_each_token() -> None:
    """Catches top log-probabilities that are lost on the wire, in either kind of stream."""

    async def scenario() -> None:
        async with serving() as served:
            root = await created(served)
            sampling = pb.SamplingOptions(max_tokens=2, logprobs=True, top_logprobs=3)
            call = served.stub.Generate(pb.GenerateRequest(context_id=root, sampling=sampling))
            chunks = [message.chunk async for message in call]
            branches = pb.GenerateBranchesRequest(context_id=root, count=2, sampling=sampling)
            async for message in served.stub.GenerateBranches(branches):
                chunks.extend(message.chunks)
            assert len(chunks) == 6
            for chunk in chunks:
                (top,) = chunk.top_logprobs
                assert (list(top.token_ids), list(top.logprobs)) == ([0, 1, 2], [0, -1, -2])

    run(scenario())


def test_create_reports_the_prompts_logprobs_when_asked() -> None:
    """Catches an option of Create that ends at the service."""

    async def scenario() -> None:
        async with serving() as served:
            for asked, expected in ((True, [-0.25, -0.25]), (False, [])):
                request = pb.CreateRequest(token_ids=tokens(1, 2, 3), logprobs=asked)
                assert list((await served.stub.Create(request)).logprobs) == expected

    run(scenario())


def test_generate_streams_a_message_per_step() -> None:
    """Catches a message per token or a finish that costs an extra message."""

    async def scenario() -> None:
        async with serving() as served:
            root = await created(served)
            sampling = pb.SamplingOptions(max_tokens=3, seed=2**62, logprobs=True, temperature=0.7)
            call = served.stub.Generate(pb.GenerateRequest(context_id=root, sampling=sampling))
            messages = [message async for message in call]
            assert [list(message.chunk.token_ids) for message in messages] == [[6], [12], [24]]
            assert [message.chunk.text for message in messages] == ["x", "x", "x"]
            assert [list(message.chunk.logprobs) for message in messages] == [[-1.5]] * 3
            assert [message.HasField("finish") for message in messages] == [False, False, True]
            finish = messages[-1].finish
            assert finish.reason == pb.FINISH_REASON_LENGTH
            assert finish.seed == 2**62
            assert (finish.context.length, finish.usage.generated_tokens) == (6, 3)
            assert not finish.HasField("stop")
            assert not finish.HasField("num_tokens_before_stop")
            assert finish.pool.total_blocks == 64
            assert not served.engine.open_streams

    run(scenario())


def test_generate_that_fails_ends_with_its_status_after_what_it_committed() -> None:
    """Catches committed tokens that the client never hears of because a later step failed."""

    async def scenario() -> None:
        engine = FakeEngine()
        engine.branch_error = errors.InternalError("NaN.", reason=Reason.ENGINE_STEP_FAILED)
        async with serving(engine) as served:
            root = await created(served)
            call = served.stub.Generate(
                pb.GenerateRequest(context_id=root, sampling=pb.SamplingOptions(max_tokens=2))
            )
            received: list[pb.GenerateResponse] = []
            error = await failure_of(call, received)
            assert type(error) is errors.InternalError
            assert error.reason is Reason.ENGINE_STEP_FAILED
            assert error.message == "NaN."
            ids = [token for message in received for token in message.chunk.token_ids]
            assert engine.contexts[root].tokens == [1, 2, 3, *ids]

    run(scenario())


def test_generate_branches_gives_handles_first_and_a_finish_per_branch() -> None:
    """Catches branches mixed up, or one branch's failure that ends the others."""

    async def scenario() -> None:
        engine = FakeEngine()
        engine.branch_error = errors.PoolExhausted(
            "No blocks.", metadata={"need": 4}, retry_after=1.5
        )
        async with serving(engine) as served:
            root = await created(served)
            call = served.stub.GenerateBranches(
                pb.GenerateBranchesRequest(
                    context_id=root,
                    count=3,
                    at=2,
                    sampling=pb.SamplingOptions(max_tokens=2, logprobs=True),
                )
            )
            messages = [message async for message in call]
            handles = [context.id for context in messages[0].contexts]
            assert len(handles) == 3
            assert not any(message.contexts for message in messages[1:])
            assert [chunk.branch for chunk in messages[1].chunks] == [0, 1, 2]
            assert [list(chunk.logprobs) for chunk in messages[1].chunks] == [[-1.5]] * 3
            assert {chunk.text for chunk in messages[1].chunks} == {"x"}
            for branch, handle in enumerate(handles):
                ids = [
                    t for m in messages for c in m.chunks if c.branch == branch for t in c.token_ids
                ]
                assert engine.contexts[handle].tokens == [1, 2, *ids]
            finishes = messages[-1].finishes
            assert [finish.branch for finish in finishes] == [0, 1, 2]
            assert [finish.reason for finish in finishes] == [
                pb.FINISH_REASON_LENGTH,
                pb.FINISH_REASON_LENGTH,
                pb.FINISH_REASON_ERROR,
            ]
            assert finishes[2].error.reason == "KV_BLOCKS_EXHAUSTED"
            assert dict(finishes[2].error.metadata) == {"need": "4"}
            assert finishes[2].error.retry_after == 1.5

    run(scenario())


def test_score_keeps_the_order_of_continuations() -> None:
    """Catches scores handed to the wrong continuation when texts and ids are mixed."""

    async def scenario() -> None:
        async with serving() as served:
            root = await created(served)
            answer = await served.stub.Score(
                pb.ScoreRequest(
                    context_id=root,
                    continuations=[
                        pb.Continuation(text="ab"),
                        pb.Continuation(token_ids=tokens(5, 6, 7)),
                    ],
                )
            )
            assert [list(score.token_ids) for score in answer.scores] == [[97, 98], [5, 6, 7]]
            assert [score.total for score in answer.scores] == [-0.5, -0.75]
            assert served.engine.contexts[root].tokens == [1, 2, 3]

    run(scenario())


def test_truncate_release_get_and_list() -> None:
    """Catches a length of 0 taken for none, and pages that repeat or skip a context."""

    async def scenario() -> None:
        async with serving() as served:
            stub = served.stub
            root = await created(served)
            branches = (await stub.Fork(pb.ForkRequest(context_id=root, count=3))).contexts
            truncated = await stub.Truncate(pb.TruncateRequest(context_id=root, length=0))
            assert truncated.context.length == 0
            assert truncated.pool.total_blocks == 64
            assert (await stub.Get(pb.GetRequest(context_id=branches[0].id))).context.length == 3
            seen: list[str] = []
            page = pb.ListResponse(next_page_token="0")
            while page.next_page_token:
                page = await stub.List(
                    pb.ListRequest(root_id=root, page_size=3, page_token=page.next_page_token)
                )
                seen += [context.id for context in page.contexts]
            assert seen == [root, *(branch.id for branch in branches)]
            twice = pb.ReleaseRequest(context_ids=[root, root, branches[0].id])
            released = await stub.Release(twice)
            assert (released.num_released, released.pool.total_blocks) == (2, 64)
            assert isinstance(await failure_of(stub.Release(twice)), errors.NotFound)
            twice.allow_missing = True
            assert (await stub.Release(twice)).num_released == 0

    run(scenario())


def test_server_info_names_model_limits_and_options() -> None:
    """Catches facts a client plans by that are missing or another field's."""

    async def scenario() -> None:
        async with serving(stall_timeout=7.0) as served:
            info = await served.stub.GetServerInfo(pb.GetServerInfoRequest())
            assert list(info.api_versions) == ["agentkv.v1"]
            assert (info.model.name, info.model.vocab_size, info.model.max_length) == (
                "fake",
                300,
                4096,
            )
            assert (info.limits.max_fork_count, info.limits.max_continuations) == (8, 4)
            assert info.limits.stall_timeout == 7.0
            assert {"max_tokens", "min_p", "stop"} <= set(info.sampling_options)
            assert (info.counters.computed_tokens, info.counters.num_preemptions) == (9, 1)
            assert info.pool.total_blocks == 64

    run(scenario())
