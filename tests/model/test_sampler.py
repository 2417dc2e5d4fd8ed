"""Tokens from logits: the same in any batch, failures alone, log-probabilities of raw logits."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from logit_rows import VOCAB_SIZE, params, random_logits, sample_of, tokens_of

from agentkv.core.batch import Sample, Sampled
from agentkv.core.token_rules import TokenRules, mask_of
from agentkv.model.sampler import Sampler
from agentkv.sampling_params import SamplingParams


def branch_tokens(
    sampler: Sampler, options: SamplingParams, ordinals: Sequence[int], *, seed: int
) -> list[Any]:
    """Sixteen tokens of each branch from one model: logits depend on the last token alone."""
    table = random_logits(VOCAB_SIZE, seed=5)
    branches: list[list[int]] = [[3] for _ in ordinals]
    for step in range(16):
        logits = table[[branch[-1] for branch in branches]]
        samples = [sample_of(options, seed=seed, ordinal=o, at=20 + step) for o in ordinals]
        for branch, sampled in zip(branches, sampler.sample(logits, samples), strict=True):
            branch.append(sampled.token)
    return branches


def test_case_061_branches_with_one_seed_differ_and_repeat(sampler: Sampler) -> None:
    """Catches one seed cloned to all branches, which then all say the same."""
    first = branch_tokens(sampler, params(), range(4), seed=42)
    assert len({tuple(branch) for branch in first}) == 4
    assert branch_tokens(sampler, params(), range(4), seed=42) == first
    alone = [branch_tokens(sampler, params(), [ordinal], seed=42)[0] for ordinal in range(4)]
    assert alone == first


@pytest.mark.parametrize(
    "neighbour",
    [
        None,
        sample_of(params(), seed=9),
        sample_of(params(top_p=0.5, min_p=0.1, top_k=7), seed=9),
        sample_of(params(temperature=0.0)),
        sample_of(params(top_k=1)),
        sample_of(params(logprobs=True), seed=10),
    ],
)
@pytest.mark.parametrize("options", [{}, {"top_p": 0.8}, {"top_k": 9}, {"min_p": 0.05}])
def test_case_062_a_seeded_row_is_the_same_beside_any_neighbour(
    sampler: Sampler, neighbour: Sample | None, options: dict[str, Any]
) -> None:
    """Catches a generator that the rows of a batch share."""
    logits = random_logits(40)
    mine = [sample_of(params(temperature=0.8, **options), at=at) for at in range(40)]
    alone = [sampler.sample(logits[at : at + 1], [mine[at]])[0] for at in range(40)]
    if neighbour is None:
        assert sampler.sample(logits, mine) == alone
        return
    others = random_logits(40, seed=1)
    mixed = torch.stack([others, logits], dim=1).flatten(0, 1)
    samples = [each for at in range(40) for each in (neighbour, mine[at])]
    assert sampler.sample(mixed, samples)[1::2] == alone


@pytest.mark.slow
@pytest.mark.parametrize("num_threads", [1, 2])
def test_rows_are_bit_identical_in_batches_of_any_size(sampler: Sampler, num_threads: int) -> None:
    """Catches sums whose order depends on the batch or on the threads; a real vocabulary."""
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        logits = random_logits(12, vocab_size=49_152)
        options = [
            params(logprobs=True),
            params(top_p=0.9, logprobs=True, top_logprobs=5),
            params(top_k=40),
            params(min_p=0.01, temperature=1.5, typical_p=0.8),
            params(temperature=0.0, logprobs=True),
        ]
        samples = [sample_of(options[row % 5], ordinal=row) for row in range(12)]
        together = sampler.sample(logits, samples)
        for size in (1, 5):
            parts = [
                sampler.sample(logits[start : start + size], samples[start : start + size])
                for start in range(0, 12, size)
            ]
            assert [each for part in parts for each in part] == together
    finally:
        torch.set_num_threads(before)


PINNED = [
    [3, 183, 128, 106, 176, 99, 47, 74, 18, 93, 208, 170, 11, 119, 3, 140, 143],
    [3, 126, 11, 119, 8, 204, 171, 200, 56, 7, 2, 122, 172, 93, 173, 44, 71],
]


def test_case_064_a_seed_names_its_tokens_for_good(sampler: Sampler) -> None:
    """Catches a change of the generator, which would break every recorded replay."""
    assert branch_tokens(sampler, params(), [0, 1], seed=42) == PINNED


def test_case_064_branches_without_a_seed_differ(sampler: Sampler) -> None:
    """Catches unseeded siblings that share a fixed default: here the engine drew two seeds."""
    one, other = (branch_tokens(sampler, params(), range(8), seed=seed) for seed in (101, 102))
    assert len({tuple(branch) for branch in one + other}) == 16


@pytest.mark.parametrize(
    "options",
    [{}, {"seed": 7}, {"top_p": 0.5}, {"top_k": 5}, {"min_p": 0.3}],
)
def test_case_067_temperature_zero_is_greedy(sampler: Sampler, options: dict[str, Any]) -> None:
    """Catches a temperature of 0 that draws, or divides."""
    logits = random_logits(4)[:1].expand(4, -1)
    samples = [sample_of(params(temperature=0.0, **options), ordinal=o) for o in range(4)]
    assert tokens_of(sampler.sample(logits, samples)) == [int(logits[0].argmax())] * 4


@pytest.mark.parametrize("temperature", [1e-8, 5e-324])
def test_case_067_a_tiny_temperature_does_not_overflow(
    sampler: Sampler, temperature: float
) -> None:
    """Catches a division that turns logits into inf, and inf - inf into NaN."""
    logits = 1e4 * random_logits(8)
    samples = [sample_of(params(temperature=temperature), ordinal=o) for o in range(8)]
    assert tokens_of(sampler.sample(logits, samples)) == logits.argmax(dim=-1).tolist()


def test_case_067_greedy_rows_leave_their_neighbours_alone(sampler: Sampler) -> None:
    """Catches a batch that is treated as greedy, or as random, as a whole."""
    logits = random_logits(2)
    warm = sample_of(params())
    cold = sample_of(params(temperature=0.0))
    mixed = sampler.sample(logits, [cold, warm])
    assert mixed[0].token == int(logits[0].argmax())
    assert mixed[1:] == sampler.sample(logits[1:], [warm])


def test_of_equal_logits_greedy_takes_the_lowest_id(sampler: Sampler) -> None:
    """Catches ties broken by how a kernel splits a row."""
    logits = torch.zeros(3, 70_000)
    logits[1, [61_000, 69_999, 5]] = 2.0
    logits[2, 69_999] = 2.0
    samples = [sample_of(params(temperature=0.0))] * 3
    assert tokens_of(sampler.sample(logits, samples)) == [0, 5, 69_999]


def test_nothing_left_to_choose_fails_alone(sampler: Sampler) -> None:
    """Catches a token drawn that a mask rules out, when masks together allow none."""
    options = params(top_p=0.9)
    banned = TokenRules.of(params(allowed_token_ids=(4,)), VOCAB_SIZE)
    dead = sample_of(options)._replace(rules=banned, masks=(mask_of([5], VOCAB_SIZE),))
    logits = random_logits(2)
    found = sampler.sample(logits, [dead, sample_of(options)])
    assert found[0] == Sampled(-1, None, failed=True, is_stuck=True)
    assert found[1:] == sampler.sample(logits[1:], [sample_of(options)])


def test_the_most_likely_tokens_are_listed_from_the_raw_logits(sampler: Sampler) -> None:
    """Catches a list after filters, in another order, or of another row."""
    logits = random_logits(4)
    logits[2, [9, 3, 50]] = 30.0
    sizes = (3, 0, 2, 64)
    options = [
        params(logprobs=True, top_logprobs=size, temperature=0.1, top_k=2, banned_token_ids=(9,))
        for size in sizes
    ]
    rules = TokenRules.of(options[0], VOCAB_SIZE)
    found = sampler.sample(logits, [sample_of(each)._replace(rules=rules) for each in options])
    expected = logits.double().log_softmax(dim=-1)
    for row, (each, size) in enumerate(zip(found, sizes, strict=True)):
        assert each.token != 9
        if not size:
            assert each.top is None
            continue
        assert each.top is not None
        order = np.argsort(-logits[row].numpy(), kind="stable")[:size]
        assert list(each.top.token_ids) == order.tolist()
        values = expected[row, torch.tensor(order)]
        assert each.top.logprobs == pytest.approx(values.tolist(), abs=1e-5)


@pytest.mark.parametrize("bad", [[math.nan], [math.inf], [-math.inf] * VOCAB_SIZE])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_that_is_not_finite_fails_alone(
    sampler: Sampler, bad: list[float], temperature: float
) -> None:
    """Catches a NaN that ends the batch, or a token drawn from it."""
    logits = random_logits(3)
    samples = [sample_of(params(temperature=temperature, top_p=0.9, logprobs=True))] * 3
    expected = sampler.sample(logits, samples)
    logits[1, : len(bad)] = torch.tensor(bad)
    found = sampler.sample(logits, samples)
    assert found[1] == Sampled(-1, None, failed=True, is_stuck=set(bad) == {-torch.inf})
    assert [found[0], found[2]] == [expected[0], expected[2]]


def test_masked_tokens_are_never_drawn(sampler: Sampler) -> None:
    """Catches -inf, a token that is ruled out, being treated as a failure or drawn."""
    logits = torch.full((1, VOCAB_SIZE), -math.inf)
    logits[0, 7] = -5.0
    for options in (params(), params(top_k=3), params(top_p=0.99), params(temperature=0.0)):
        assert sampler.sample(logits, [sample_of(options)]) == [Sampled(7, None)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logprobs_are_of_the_raw_logits(sampler: Sampler, dtype: torch.dtype) -> None:
    """Catches log-probabilities after temperature or filters, or in low precision."""
    logits = random_logits(6).to(dtype)
    options = [params(logprobs=True), params(temperature=0.0, logprobs=True),
               params(temperature=0.2, top_k=2, logprobs=True), params()] * 2  # fmt: skip
    found = sampler.sample(logits, [sample_of(each) for each in options[:6]])
    expected = logits.double().log_softmax(dim=-1)
    for row, each in enumerate(found):
        if options[row].logprobs:
            assert each.logprob == pytest.approx(float(expected[row, each.token]), abs=1e-5)
        else:
            assert each.logprob is None


def test_token_logprobs_are_those_of_given_tokens(sampler: Sampler) -> None:
    """Catches Score and Generate disagreeing about one token's log-probability."""
    logits = random_logits(5)
    found = sampler.sample(logits, [sample_of(params(logprobs=True))] * 5)
    given = sampler.token_logprobs(logits, tokens_of(found))
    assert given == [each.logprob for each in found]
    assert sampler.token_logprobs(logits[:0], []) == []


def test_nothing_to_sample_is_no_work(sampler: Sampler) -> None:
    """Catches an empty batch reaching a kernel."""
    assert sampler.sample(random_logits(0), []) == []
