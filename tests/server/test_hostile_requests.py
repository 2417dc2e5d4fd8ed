"""Requests made to cost much: each is refused before any work grows with it."""

import asyncio
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest
from server.fake_engine import MAX_LENGTH, FakeEngine
from server.harness import failure_of, run, serving

from agentkv.config import ServerConfig
from agentkv.errors import InvalidRequest, Reason
from agentkv.server.input_checks import MAX_CHARACTERS_PER_TOKEN
from agentkv.server.service import ContextService
from agentkv.v1 import agentkv_pb2 as pb

MEGABYTE = 1 << 20
LONG_TEXT = "the cat " * (10 * MEGABYTE // 8)


def generate(**options: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(context_id="c0", sampling=pb.SamplingOptions(**options))


def unknown_options(count: int) -> pb.GenerateRequest:
    request = generate(max_tokens=1)
    request.sampling.MergeFromString(b"\xf8\x07\x01" * count)
    return request


CASES: dict[str, tuple[str, Callable[[], Any], Reason]] = {
    "fork count": (
        "Fork",
        lambda: pb.ForkRequest(context_id="c0", count=2**31 - 1),
        Reason.INVALID_REQUEST,
    ),
    "branch count": (
        "GenerateBranches",
        lambda: pb.GenerateBranchesRequest(context_id="c0", count=5_000_000),
        Reason.INVALID_REQUEST,
    ),
    "max_tokens": ("Generate", lambda: generate(max_tokens=2**32 - 1), Reason.INVALID_REQUEST),
    "stops": ("Generate", lambda: generate(stop=["s"] * 1_000_000), Reason.INVALID_REQUEST),
    "stop ids": (
        "Generate",
        lambda: generate(stop_token_ids=[1] * 1_000_000),
        Reason.INVALID_REQUEST,
    ),
    "unknown options": ("Generate", lambda: unknown_options(1_000_000), Reason.UNSUPPORTED_OPTION),
    "prompt": ("Create", lambda: pb.CreateRequest(text=LONG_TEXT), Reason.CONTEXT_TOO_LONG),
    "turn": (
        "Create",
        lambda: pb.CreateRequest(
            messages=pb.ChatMessages(messages=[pb.ChatMessage(role="user", content=LONG_TEXT)])
        ),
        Reason.CONTEXT_TOO_LONG,
    ),
    "turns": (
        "Create",
        lambda: pb.CreateRequest(
            messages=pb.ChatMessages(messages=[pb.ChatMessage(role="none")] * 300_000)
        ),
        Reason.INVALID_REQUEST,
    ),
    "extension": (
        "Extend",
        lambda: pb.ExtendRequest(context_id="c0", text=LONG_TEXT),
        Reason.CONTEXT_TOO_LONG,
    ),
    "ids": (
        "Create",
        lambda: pb.CreateRequest(token_ids=pb.TokenIds(ids=[1] * 1_000_000)),
        Reason.CONTEXT_TOO_LONG,
    ),
    "largest id": (
        "Create",
        lambda: pb.CreateRequest(token_ids=pb.TokenIds(ids=[2**32 - 1])),
        Reason.TOKEN_OUT_OF_RANGE,
    ),
    "continuation": (
        "Score",
        lambda: pb.ScoreRequest(context_id="c0", continuations=[pb.Continuation(text=LONG_TEXT)]),
        Reason.CONTEXT_TOO_LONG,
    ),
    "continuations": (
        "Score",
        lambda: pb.ScoreRequest(context_id="c0", continuations=[pb.Continuation()] * 300_000),
        Reason.INVALID_REQUEST,
    ),
    "labels": (
        "Fork",
        lambda: pb.ForkRequest(context_id="c0", labels={f"{i}": "" for i in range(50_000)}),
        Reason.INVALID_REQUEST,
    ),
    "handles": (
        "Release",
        lambda: pb.ReleaseRequest(context_ids=["c"] * 1_000_000),
        Reason.INVALID_REQUEST,
    ),
    "request id": (
        "Fork",
        lambda: pb.ForkRequest(context_id="c0", request_id="r" * (8 * MEGABYTE)),
        Reason.INVALID_REQUEST,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_case_102_a_huge_request_is_refused_before_work_grows_with_it(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a loop, a copy or a tokenizer that a short or a long request makes run for long."""
    method, make, reason = CASES[name]

    def encodes(*arguments: Any, **options: Any) -> list[int]:
        raise AssertionError("tokenised")

    async def scenario() -> InvalidRequest:
        engine = FakeEngine()
        for encode in ("encode", "encode_prompt", "encode_chat"):
            monkeypatch.setattr(engine.tokenizer, encode, encodes)
        service = ContextService(engine, ServerConfig())
        behaviour: Any = getattr(service, method)
        with pytest.raises(InvalidRequest) as caught:
            await behaviour(request, None)
        assert engine.calls == []
        return caught.value

    request = make()
    tracemalloc.start()
    try:
        error = asyncio.run(scenario())
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert error.reason is reason
    assert len(error.violations) == 1
    # The text of a field is copied once, to look at it. A list of its entries would be 50 MB.
    assert peak < 12 * MEGABYTE


def test_case_102_ten_megabytes_of_text_over_the_wire() -> None:
    """Catches a prompt of minutes of tokenising that a message limit of 16 MiB lets in."""

    async def scenario() -> None:
        async with serving() as served:
            error = await failure_of(served.stub.Create(pb.CreateRequest(text=LONG_TEXT)))
            assert error.reason is Reason.CONTEXT_TOO_LONG
            assert served.engine.calls == ["start"]
            info = await served.stub.GetServerInfo(pb.GetServerInfoRequest())
            assert info.limits.max_characters == MAX_LENGTH * MAX_CHARACTERS_PER_TOKEN

    run(scenario())
