"""What a bad request gets: one code and reason each, before the engine hears of it."""

import math
from dataclasses import replace
from typing import Any

import grpc.aio
import pytest
from server.harness import failure_of, run, serving

from agentkv.errors import InvalidRequest, Reason
from agentkv.server.checks import MAX_RELEASE_COUNT, MAX_REQUEST_ID
from agentkv.v1 import agentkv_pb2 as pb


def tokens(*ids: int) -> pb.TokenIds:
    return pb.TokenIds(ids=ids)


def chat(*turns: tuple[str, str]) -> pb.ChatMessages:
    return pb.ChatMessages(messages=[pb.ChatMessage(role=r, content=c) for r, c in turns])


def generate(**options: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(context_id="c0", sampling=pb.SamplingOptions(**options))


def score(*continuations: pb.Continuation) -> pb.ScoreRequest:
    return pb.ScoreRequest(context_id="c0", continuations=continuations)


BAD = Reason.INVALID_REQUEST
TOKEN = Reason.TOKEN_OUT_OF_RANGE
LONG = Reason.CONTEXT_TOO_LONG
UNSUPPORTED = Reason.UNSUPPORTED_OPTION

CASES: list[tuple[str, str, Any, Reason, list[str]]] = [
    ("no prompt", "Create", pb.CreateRequest(), BAD, ["prompt"]),
    ("empty text", "Create", pb.CreateRequest(text=""), BAD, ["text"]),
    ("NUL", "Create", pb.CreateRequest(text="a\0b"), BAD, ["text"]),
    ("no ids", "Create", pb.CreateRequest(token_ids=tokens()), BAD, ["token_ids"]),
    ("id too big", "Create", pb.CreateRequest(token_ids=tokens(1, 300)), TOKEN, ["token_ids"]),
    ("largest id", "Create", pb.CreateRequest(token_ids=tokens(2**32 - 1)), TOKEN, ["token_ids"]),
    (
        "too many ids",
        "Create",
        pb.CreateRequest(token_ids=tokens(*[1] * 4097)),
        LONG,
        ["token_ids"],
    ),
    ("too long text", "Create", pb.CreateRequest(text="y" * 4096), LONG, ["text"]),
    ("no turns", "Create", pb.CreateRequest(messages=chat()), BAD, ["messages"]),
    (
        "unknown role",
        "Create",
        pb.CreateRequest(messages=chat(("user", "hi"), ("wizard", "hi"))),
        UNSUPPORTED,
        ["messages[1].role"],
    ),
    (
        "NUL in a turn",
        "Create",
        pb.CreateRequest(messages=chat(("user", "\0"))),
        BAD,
        ["messages[0].content"],
    ),
    (
        "too many labels",
        "Create",
        pb.CreateRequest(text="a", labels={str(i): "" for i in range(65)}),
        BAD,
        ["labels"],
    ),
    ("empty label", "Create", pb.CreateRequest(text="a", labels={"": "v"}), BAD, ["labels"]),
    (
        "long label",
        "Create",
        pb.CreateRequest(text="a", labels={"k": "v" * 257}),
        BAD,
        ["labels[k]"],
    ),
    (
        "long request id",
        "Create",
        pb.CreateRequest(text="a", request_id="r" * (MAX_REQUEST_ID + 1)),
        BAD,
        ["request_id"],
    ),
    ("control", "Create", pb.CreateRequest(text="a", request_id="a\nb"), BAD, ["request_id"]),
    ("fork of nothing", "Fork", pb.ForkRequest(), BAD, ["context_id"]),
    ("fork 0", "Fork", pb.ForkRequest(context_id="c0", count=0), BAD, ["count"]),
    ("fork 9 of 8", "Fork", pb.ForkRequest(context_id="c0", count=9), BAD, ["count"]),
    ("fork 2**32", "Fork", pb.ForkRequest(context_id="c0", count=2**32 - 1), BAD, ["count"]),
    ("extend by nothing", "Extend", pb.ExtendRequest(context_id="c0"), BAD, ["input"]),
    ("extend by ''", "Extend", pb.ExtendRequest(context_id="c0", text=""), BAD, ["text"]),
    (
        "extend by a bad id",
        "Extend",
        pb.ExtendRequest(context_id="c0", token_ids=tokens(300)),
        TOKEN,
        ["token_ids"],
    ),
    ("temperature NaN", "Generate", generate(temperature=math.nan), BAD, ["sampling.temperature"]),
    ("temperature inf", "Generate", generate(temperature=math.inf), BAD, ["sampling.temperature"]),
    ("temperature -1", "Generate", generate(temperature=-1.0), BAD, ["sampling.temperature"]),
    ("top_p 0", "Generate", generate(top_p=0.0), BAD, ["sampling.top_p"]),
    ("top_p 1.1", "Generate", generate(top_p=1.1), BAD, ["sampling.top_p"]),
    ("top_k 0", "Generate", generate(top_k=0), BAD, ["sampling.top_k"]),
    ("min_p 2", "Generate", generate(min_p=2.0), BAD, ["sampling.min_p"]),
    ("seed 2**63", "Generate", generate(seed=2**63), BAD, ["sampling.seed"]),
    ("max_tokens 0", "Generate", generate(max_tokens=0), BAD, ["sampling.max_tokens"]),
    ("max_tokens huge", "Generate", generate(max_tokens=2**32 - 1), BAD, ["sampling.max_tokens"]),
    ("empty stop", "Generate", generate(stop=[""]), BAD, ["sampling.stop"]),
    ("100,000 stops", "Generate", generate(stop=["s"] * 100_000), BAD, ["sampling.stop"]),
    (
        "stop id too big",
        "Generate",
        generate(stop_token_ids=[300]),
        TOKEN,
        ["sampling.stop_token_ids"],
    ),
    *[
        (f"{name} {value}", "Generate", generate(**{name: value}), BAD, [f"sampling.{name}"])
        for name, value in [
            ("typical_p", 0.0),
            ("typical_p", math.nan),
            ("repetition_penalty", 0.0),
            ("repetition_penalty", math.nan),
            ("presence_penalty", math.inf),
            ("frequency_penalty", -101.0),
            ("min_tokens", 257),
            ("top_logprobs", 3),
            ("logit_bias", {1: math.nan}),
            ("logit_bias", {1: 1001.0}),
            ("logit_bias", dict.fromkeys(range(100000), 1.0)),
            ("allowed_token_ids", [1] * 100_000),
            ("banned_token_ids", [1] * 4097),
        ]
    ],
    *[
        (f"{name} beyond", "Generate", generate(**{name: value}), TOKEN, [f"sampling.{name}"])
        for name, value in [
            ("logit_bias", {300: 1.0}),
            ("allowed_token_ids", [1, 300]),
            ("banned_token_ids", [300]),
        ]
    ],
    (
        "top_logprobs huge",
        "Generate",
        generate(logprobs=True, top_logprobs=10**9),
        BAD,
        ["sampling.top_logprobs"],
    ),
    (
        "allowed and banned",
        "Generate",
        generate(allowed_token_ids=[1, 2], banned_token_ids=[2]),
        BAD,
        ["sampling.banned_token_ids"],
    ),
    (
        "everything at once",
        "Generate",
        generate(
            max_tokens=4,
            min_tokens=5,
            temperature=math.nan,
            top_p=0.0,
            typical_p=2.0,
            repetition_penalty=-1.0,
            logit_bias={300: 1.0},
            stop=["s"] * 100_000,
            allowed_token_ids=[7],
            banned_token_ids=[7],
            top_logprobs=1,
        ),
        BAD,
        [
            *("sampling.banned_token_ids", "sampling.logit_bias", "sampling.min_tokens"),
            *("sampling.repetition_penalty", "sampling.stop", "sampling.temperature"),
            *("sampling.top_logprobs", "sampling.top_p", "sampling.typical_p"),
        ],
    ),
    (
        "several",
        "Generate",
        generate(top_p=0.0, temperature=-1.0, stop_token_ids=[300]),
        BAD,
        ["sampling.stop_token_ids", "sampling.temperature", "sampling.top_p"],
    ),
    (
        "branches",
        "GenerateBranches",
        pb.GenerateBranchesRequest(count=0, sampling=pb.SamplingOptions(max_tokens=0)),
        BAD,
        ["context_id", "count", "sampling.max_tokens"],
    ),
    ("no continuations", "Score", score(), BAD, ["continuations"]),
    (
        "5 of 4 continuations",
        "Score",
        score(*[pb.Continuation(text="a")] * 5),
        BAD,
        ["continuations"],
    ),
    (
        "bad continuations",
        "Score",
        score(pb.Continuation(text="a"), pb.Continuation(text=""), pb.Continuation()),
        BAD,
        ["continuations[1].text", "continuations[2]"],
    ),
    ("refused text", "Create", pb.CreateRequest(text="a<control>"), BAD, ["text"]),
    (
        "refused turn",
        "Create",
        pb.CreateRequest(messages=chat(("user", "<control>"))),
        BAD,
        ["messages"],
    ),
    (
        "refused extension",
        "Extend",
        pb.ExtendRequest(context_id="c0", text="y" * 3000 + "<control>"),
        BAD,
        ["text"],
    ),
    (
        "refused continuation",
        "Score",
        score(pb.Continuation(text="a"), pb.Continuation(text="<control>")),
        BAD,
        ["continuations[1].text"],
    ),
    ("no length", "Truncate", pb.TruncateRequest(context_id="c0"), BAD, ["length"]),
    ("nothing to release", "Release", pb.ReleaseRequest(), BAD, ["context_ids"]),
    ("release of ''", "Release", pb.ReleaseRequest(context_ids=[""]), BAD, ["context_ids"]),
    (
        "too many handles",
        "Release",
        pb.ReleaseRequest(context_ids=["c"] * (MAX_RELEASE_COUNT + 1)),
        BAD,
        ["context_ids"],
    ),
    ("get nothing", "Get", pb.GetRequest(), BAD, ["context_id"]),
    ("page of 0", "List", pb.ListRequest(page_size=0), BAD, ["page_size"]),
    ("page of 1001", "List", pb.ListRequest(page_size=1001), BAD, ["page_size"]),
    ("list of ''", "List", pb.ListRequest(root_id=""), BAD, ["root_id"]),
    ("foreign page", "List", pb.ListRequest(page_token="p" * 513), BAD, ["page_token"]),
]


@pytest.mark.parametrize(
    ("method", "request_", "reason", "fields"),
    [case[1:] for case in CASES],
    ids=[f"{case[1]}: {case[0]}" for case in CASES],
)
def test_bad_request(method: str, request_: Any, reason: Reason, fields: list[str]) -> None:
    """Catches bad input that reaches the engine, or an answer that does not name each fault."""

    async def scenario() -> None:
        async with serving() as served:
            before = list(served.engine.calls)
            error = await failure_of(getattr(served.stub, method)(request_))
            assert isinstance(error, InvalidRequest)
            assert error.reason is reason
            assert sorted(error.violations) == fields
            assert served.engine.calls == before

    run(scenario())


def test_violations_are_capped_but_told() -> None:
    """Catches an error lost because its details outgrew gRPC's limit."""

    async def scenario() -> None:
        async with serving() as served:
            turns = [("wizard", "x")] * 1000
            error = await failure_of(served.stub.Create(pb.CreateRequest(messages=chat(*turns))))
            assert error.reason is UNSUPPORTED
            assert len(error.violations) == 32

    run(scenario())


UNKNOWN = b"\xf8\x07\x01"  # field 127, varint 1


@pytest.mark.parametrize(
    ("method", "raw", "field"),
    [
        ("Generate", generate().SerializeToString() + UNKNOWN, "127"),
        ("Generate", b"\x0a\x01c\x12\x03" + UNKNOWN, "sampling.127"),
        ("Generate", b"\x0a\x01c\x12\x83\x10" + UNKNOWN + UNKNOWN * 682 + b"\x08\x05", "request"),
        ("Score", b"\x0a\x01c\x12\x06\x0a\x01a" + UNKNOWN, "request"),
        ("Fork", b"\x0a\x01c" + UNKNOWN, "127"),
        ("GetServerInfo", UNKNOWN, "127"),
    ],
    ids=["request", "sampling", "too many to name", "deep", "fork", "info"],
)
def test_an_option_this_version_does_not_know_is_refused(
    method: str, raw: bytes, field: str
) -> None:
    """Catches an option of a newer client that is ignored: the answer would be another one."""

    async def scenario() -> None:
        async with serving() as served:
            streams = method == "Generate"
            make: Any = served.channel.unary_stream if streams else served.channel.unary_unary
            error = await failure_of(make(f"/agentkv.v1.ContextService/{method}")(raw))
            assert error.reason is UNSUPPORTED
            assert list(error.violations) == [field]
            assert served.engine.calls == ["start"]

    run(scenario())


def test_messages_need_a_chat_template() -> None:
    """Catches a conversation glued together by a rule the model was not trained on."""

    async def scenario() -> None:
        async with serving() as served:
            served.engine.facts = replace(served.engine.facts, has_chat_template=False)
            error = await failure_of(
                served.stub.Create(pb.CreateRequest(messages=chat(("user", "hi"))))
            )
            assert error.reason is UNSUPPORTED

    run(scenario())


@pytest.mark.parametrize("raw", [b"\x0a\x02\xff\xff", b"\x0a\xff", b"garbage"])
def test_bytes_that_are_no_message_are_the_callers_fault(raw: bytes) -> None:
    """Catches invalid UTF-8 answered as a fault of the server, with a Python error's text."""

    async def scenario() -> None:
        async with serving() as served:
            create: Any = served.channel.unary_unary("/agentkv.v1.ContextService/Create")
            error = await failure_of(create(raw))
            assert isinstance(error, InvalidRequest)
            assert error.reason is BAD
            assert "Decode" not in error.message

    run(scenario())


def test_a_message_over_the_limit_is_refused_unread() -> None:
    """Catches a prompt of any size held in memory before it is checked."""

    async def scenario() -> None:
        async with serving(max_message_bytes=1000) as served:
            call = served.stub.Create(pb.CreateRequest(text="y" * 1001))
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call
            assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED

    run(scenario())
