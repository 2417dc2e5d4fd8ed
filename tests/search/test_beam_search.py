"""Beam search over the wire equals transformers' own, and diverse beams equal the paper's."""

import asyncio
import itertools
from typing import Any

import pytest
import torch
from server.harness import run
from server.real_engine import MAX_LENGTH, really_serving, tiny_engine
from slow_twin import PlainModel
from tiny_engines import TEXT_VOCAB_SIZE
from tiny_models import build_tiny_model
from transformers import PreTrainedModel

from agentkv.client.async_client import AsyncClient
from agentkv.client.client import Client
from agentkv.errors import InvalidRequest
from agentkv.search.beam_groups import BeamOptions, Hypothesis
from agentkv.search.beam_search import beam_search, beam_search_async

pytestmark = pytest.mark.slow

PROMPT = [(17 * number + 5) % 250 + 3 for number in range(21)]
ENDS = (40, 77, 130, 201)
NEVER: Any = "never"
SEARCHES: list[dict[str, Any]] = [
    {"num_beams": 1},
    {"num_beams": 4},
    {"num_beams": 3, "end_token_ids": ENDS},
    {"num_beams": 4, "end_token_ids": ENDS, "early_stopping": True},
    {"num_beams": 4, "end_token_ids": ENDS, "early_stopping": NEVER, "length_penalty": 2.0},
    {"num_beams": 4, "end_token_ids": ENDS, "length_penalty": -0.5},
]


def model() -> PreTrainedModel:
    made = build_tiny_model("llama", vocab_size=TEXT_VOCAB_SIZE, max_position_embeddings=MAX_LENGTH)
    made.set_attn_implementation("eager")
    return made


def transformers_search(plain: PreTrainedModel, **options: Any) -> list[Hypothesis]:
    """What transformers finds."""
    found: Any = plain.generate(  # type: ignore[operator]  # torch types it as a tensor
        torch.tensor([PROMPT]),
        max_new_tokens=options["max_tokens"],
        num_beams=options["num_beams"],
        num_return_sequences=options["num_beams"],
        length_penalty=options.get("length_penalty", 1.0),
        early_stopping=options.get("early_stopping", False),
        eos_token_id=list(options.get("end_token_ids", ())) or None,
        pad_token_id=0,
        do_sample=False,
        return_dict_in_generate=True,
        output_scores=True,
    )
    sequences = [row[len(PROMPT) :].tolist() for row in found.sequences]
    ends = options.get("end_token_ids", ())
    cut = [
        tokens[: next((n + 1 for n, token in enumerate(tokens) if token in ends), len(tokens))]
        for tokens in sequences
    ]
    scores = found.get("sequences_scores")
    values = [0.0] * len(cut) if scores is None else scores.tolist()
    return [Hypothesis(tuple(t), 0.0, s) for t, s in zip(cut, values, strict=True)]


def test_the_same_sequences_as_transformers() -> None:
    """Catches a rule of ranking, of stopping or of length that differs, and a wrong parent."""
    plain, twin = model(), PlainModel(model())

    async def scenario() -> None:
        async with (
            really_serving(tiny_engine()) as served,
            AsyncClient(served.server.address) as client,
        ):
            root = await client.create(token_ids=PROMPT)
            for options in SEARCHES:
                wanted = {"max_tokens": 9, **options}
                found = await beam_search_async(root, **wanted)
                expected = transformers_search(plain, **wanted)
                assert [item.token_ids for item in found] == [item.token_ids for item in expected]
                if options["num_beams"] > 1:
                    for mine, its in zip(found, expected, strict=True):
                        assert mine.score == pytest.approx(its.score, abs=1e-4)
                for item in found:
                    logprobs = twin.logits([*PROMPT, *item.token_ids]).log_softmax(-1)
                    rows = logprobs[len(PROMPT) - 1 : -1].gather(
                        1, torch.tensor(item.token_ids)[:, None]
                    )
                    assert item.logprob == pytest.approx(float(rows.sum()), abs=1e-4)
            assert [info.id async for info in client.list()] == [root.id], "a beam was not released"
            assert root.length == len(PROMPT)

    run(scenario())


def diverse(plain: PlainModel, options: BeamOptions) -> list[tuple[tuple[int, ...], float]]:
    """Algorithm 1 of Vijayakumar et al., without ends: totals of every group's beams."""
    size = options.num_beams // options.num_groups
    groups: list[list[tuple[tuple[int, ...], float]]] = [[((), 0.0)]] * options.num_groups
    for _ in range(options.max_tokens):
        taken: list[int] = []
        for number, beams in enumerate(groups):
            scored = []
            for tokens, total in beams:
                logprobs = plain.logits([*PROMPT, *tokens])[-1].log_softmax(-1).tolist()
                scored += [
                    (
                        (*tokens, token),
                        total + value - options.diversity_penalty * taken.count(token),
                    )
                    for token, value in enumerate(logprobs)
                ]
            groups[number] = sorted(scored, key=lambda item: -item[1])[:size]
            taken += [tokens[-1] for tokens, _ in groups[number]]
    return [item for beams in groups for item in beams]


def test_diverse_beams_are_those_of_the_paper() -> None:
    """Catches a penalty on the wrong groups, one that is forgotten, or taken off twice."""
    twin = PlainModel(model())
    options = BeamOptions(
        num_beams=6, num_groups=3, diversity_penalty=0.7, max_tokens=4, length_penalty=0.0
    )

    async def scenario() -> None:
        async with really_serving(tiny_engine()) as served:

            def search() -> list[Hypothesis]:
                with (
                    Client(served.server.address) as client,
                    client.create(token_ids=PROMPT) as root,
                ):
                    return beam_search(
                        root,
                        num_beams=6,
                        num_groups=3,
                        diversity_penalty=0.7,
                        max_tokens=4,
                        length_penalty=0.0,
                    )

            found = await asyncio.to_thread(search)
            expected = sorted(diverse(twin, options), key=lambda item: -item[1])
            assert sorted(item.token_ids for item in found) == sorted(t for t, _ in expected)
            for mine, (_, total) in zip(found, expected, strict=True):
                assert mine.score == pytest.approx(total, abs=1e-4)
            assert len({item.token_ids[0] for item in found}) > 1

    run(scenario())


def test_beams_share_what_they_have_in_common() -> None:
    """Catches beams that copy their prompt: each costs the block it writes, and no more."""

    async def scenario() -> None:
        async with (
            really_serving(tiny_engine()) as served,
            AsyncClient(served.server.address) as client,
        ):
            root = await client.create(token_ids=PROMPT * 10)
            before = served.core.observer.pool().live
            await beam_search_async(root, num_beams=8, max_tokens=12)
            after = await served.settled(lambda view: view.num_contexts == 1)
            assert after.pool.live == before
            assert served.core.view().num_preemptions == 0
            assert after.computed_tokens < len(PROMPT) * 10 + 8 * 12 * 3

    run(scenario())


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"num_beams": 0, "max_tokens": 1}, "num_beams"),
        ({"num_beams": 2, "max_tokens": 0}, "max_tokens"),
        ({"num_beams": 4, "max_tokens": 1, "num_groups": 3}, "num_groups"),
        ({"num_beams": 4, "max_tokens": 1, "diversity_penalty": float("nan")}, "diversity_penalty"),
        ({"num_beams": 33, "max_tokens": 1}, "num_beams"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], field: str) -> None:
    """Catches a search that begins and cannot end well."""
    with pytest.raises(InvalidRequest) as error:
        BeamOptions(**options)
    assert list(error.value.violations) == [field]


def test_every_width_needs_few_log_probabilities() -> None:
    """Catches a width that asks for more than a server reports, refused only by the server."""
    for width, groups in itertools.product((1, 2, 8, 16), (1, 2)):
        if width % groups == 0:
            made = BeamOptions(num_beams=width, max_tokens=1, num_groups=groups)
            assert made.num_kept <= made.num_top <= 64
