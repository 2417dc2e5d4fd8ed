"""What only a real engine behind the wire can show: tokens and numbers that belong together."""

from itertools import chain
from typing import Any

import pytest
from server.harness import failure_of, run
from server.real_engine import ReallyServed, really_serving, tiny_engine

from agentkv.config import QuotaConfig, QuotasConfig
from agentkv.errors import InvalidRequest, NotFound, PoolExhausted, Reason
from agentkv.server import service
from agentkv.v1 import agentkv_pb2 as pb


async def created(served: ReallyServed, *ids: int) -> str:
    answer = await served.stub.Create(pb.CreateRequest(token_ids=pb.TokenIds(ids=ids)))
    return str(answer.context.id)


async def read_back(served: ReallyServed, context_id: str, start: int = 0) -> list[int]:
    answer = await served.stub.Get(pb.GetRequest(context_id=context_id, tokens_from=start))
    assert len(answer.token_ids) == answer.context.length - start
    return list(answer.token_ids)


def test_tokens_are_read_back_from_any_position() -> None:
    """Catches a token that is not committed yet or a sibling's, an offset, a fork's lost prefix."""

    async def scenario() -> None:
        async with really_serving() as served:
            root = await created(served, *range(10, 30))
            (branch,) = (await served.stub.Fork(pb.ForkRequest(context_id=root, at=13))).contexts
            for context_id, token in ((root, 50), (branch.id, 60)):
                ids = pb.TokenIds(ids=[token, token + 1])
                await served.stub.Extend(pb.ExtendRequest(context_id=context_id, token_ids=ids))
            assert await read_back(served, root) == [*range(10, 30), 50, 51]
            assert await read_back(served, branch.id) == [*range(10, 23), 60, 61]
            assert await read_back(served, branch.id, 12) == [22, 60, 61]
            assert await read_back(served, branch.id, 15) == []
            await served.stub.Truncate(pb.TruncateRequest(context_id=root, length=5))
            assert await read_back(served, root, 3) == [13, 14]
            plain = await served.stub.Get(pb.GetRequest(context_id=root))
            assert (plain.context.length, list(plain.token_ids)) == (5, [])
            late = served.stub.Get(pb.GetRequest(context_id=root, tokens_from=6))
            error = await failure_of(late)
            assert isinstance(error, InvalidRequest)
            assert error.reason is Reason.POSITION_OUT_OF_RANGE
            assert error.metadata["actual_length"] == "5"

    run(scenario())


def test_what_a_cut_stream_did_not_deliver_is_read_back() -> None:
    """Catches committed tokens that a client which lost its stream can never learn."""

    async def scenario() -> None:
        async with really_serving() as served:
            root = await created(served, 1, 2, 3)
            call = served.stub.Generate(
                pb.GenerateRequest(context_id=root, sampling=pb.SamplingOptions(max_tokens=500))
            )
            seen = [*(await call.read()).chunk.token_ids, *(await call.read()).chunk.token_ids]
            call.cancel()
            await served.settled(lambda view: view.num_running == 0)
            tokens = await read_back(served, root)
            assert tokens[: 3 + len(seen)] == [1, 2, 3, *seen]
            missed = await read_back(served, root, 3 + len(seen))
            assert [1, 2, 3, *seen, *missed] == tokens

    run(scenario())


def test_long_contexts_are_read_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches an answer as large as the context, and a part that ends with the wrong token."""
    monkeypatch.setattr(service, "MAX_TOKENS_READ", 7)

    async def scenario() -> None:
        async with really_serving() as served:
            root = await created(served, *range(20))
            parts = []
            for start in (0, 7, 14):
                request = pb.GetRequest(context_id=root, tokens_from=start)
                parts.append((await served.stub.Get(request)).token_ids)
            assert [len(part) for part in parts] == [7, 7, 6]
            assert list(chain(*parts)) == list(range(20))

    run(scenario())


def test_numbers_of_the_pool_are_those_of_the_answer() -> None:
    """Catches a pool read before the truncate it is to describe, or after a later change."""

    async def scenario() -> None:
        async with really_serving() as served:
            root = await created(served, *range(100))
            (branch,) = (await served.stub.Fork(pb.ForkRequest(context_id=root))).contexts
            ids = pb.TokenIds(ids=range(100))
            await served.stub.Extend(pb.ExtendRequest(context_id=branch.id, token_ids=ids))
            for length in range(199, 95, -1):
                request = pb.TruncateRequest(context_id=branch.id, length=length)
                answer = await served.stub.Truncate(request)
                assert answer.context.length == length
                # The root's 7 blocks, and the branch's own: it copied the root's last one.
                assert answer.pool.live_blocks == 7 + -(-length // 16) - 6
            forked = await served.stub.Fork(pb.ForkRequest(context_id=root, count=9))
            assert forked.pool == answer.pool

    run(scenario())


@pytest.mark.parametrize("at", [4, 4095, 4096, 2**32 - 1])
def test_a_position_beyond_the_context_is_named_as_such(at: int) -> None:
    """Catches a wrong position told as a context that is too long."""

    async def scenario() -> None:
        async with really_serving() as served:
            root = await created(served, 1, 2, 3)
            for call in (
                served.stub.Fork(pb.ForkRequest(context_id=root, at=at)),
                served.stub.GenerateBranches(pb.GenerateBranchesRequest(context_id=root, at=at)),
                served.stub.Truncate(pb.TruncateRequest(context_id=root, length=at)),
                served.stub.Get(pb.GetRequest(context_id=root, tokens_from=at)),
            ):
                error = await failure_of(call)
                assert error.reason is Reason.POSITION_OUT_OF_RANGE
                assert error.metadata["actual_length"] == "3"
            assert (await served.engine.view()).num_contexts == 1

    run(scenario())


ODD_HANDLES = [
    "x",
    "c" * 129,
    "0" * 8 + "." + "A" * 22,
    "c" * (8 << 20),
    "\0",
    "../../etc/passwd",
    "a\nb",
    "\N{GRINNING FACE}" * 64,
    "\ufeff",
]


ONE_TOKEN = pb.TokenIds(ids=[1])
OTHER_FIELDS: dict[str, dict[str, Any]] = {
    "Fork": {},
    "Extend": {"token_ids": ONE_TOKEN},
    "Generate": {},
    "GenerateBranches": {},
    "Score": {"continuations": [pb.Continuation(token_ids=ONE_TOKEN)]},
    "Truncate": {"length": 0},
    "Get": {},
}


@pytest.mark.parametrize("method", OTHER_FIELDS)
def test_a_handle_that_no_server_gave_names_nothing(method: str) -> None:
    """Catches a handle that is parsed, a second kind of answer, or a text that comes back."""

    async def scenario() -> None:
        async with really_serving() as served:
            root = await created(served, 1, 2, 3)
            await served.stub.Release(pb.ReleaseRequest(context_ids=[root]))
            answers = set()
            for handle in (*ODD_HANDLES, root):
                request = getattr(pb, f"{method}Request")(context_id=handle, **OTHER_FIELDS[method])
                error = await failure_of(getattr(served.stub, method)(request))
                answers.add((error.reason, error.message, *error.metadata, *error.violations))
            ((reason, *_),) = answers
            assert reason is Reason.CONTEXT_NOT_FOUND

    run(scenario())


def test_usage_and_quotas_cross_the_wire() -> None:
    """Catches a bill, a limit or a refusal that loses its numbers on the way."""
    quotas = QuotasConfig(default=QuotaConfig(contexts=2, blocks=40))

    async def scenario() -> None:
        async with really_serving(tiny_engine(quotas=quotas)) as served:
            root = await created(served, *range(10, 30))
            await served.stub.Fork(pb.ForkRequest(context_id=root))
            error = await failure_of(served.stub.Fork(pb.ForkRequest(context_id=root)))
            assert isinstance(error, PoolExhausted)
            assert error.reason is Reason.TENANT_QUOTA
            assert (error.metadata["quota"], error.metadata["free"]) == ("contexts", "0")
            for request in (pb.GetUsageRequest(), pb.GetUsageRequest(root_id=root)):
                answer = await served.stub.GetUsage(request)
                assert answer.num_contexts == 2
                assert answer.bill.computed_tokens == 20
                assert answer.bill.device_block_seconds > 0
                assert answer.quotas.blocks == 2
                assert (answer.quotas.max_blocks, answer.quotas.max_contexts) == (40, 2)
                assert not answer.quotas.HasField("max_block_seconds")
                tier, host = answer.tiers
                assert (tier.tier, host.tier) == (pb.TIER_DEVICE, pb.TIER_HOST)
                assert tier.taken_block_seconds == tier.held_block_seconds
            alone = await served.stub.GetUsage(pb.GetUsageRequest(context_id=root))
            assert alone.num_contexts == 1
            unknown = served.stub.GetUsage(pb.GetUsageRequest(context_id="none"))
            assert isinstance(await failure_of(unknown), NotFound)

    run(scenario())
