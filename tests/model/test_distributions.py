"""Draws follow the exact distribution, each option alone and all together."""

from typing import Any

import numpy as np
import pytest
import torch
from logit_rows import params, random_logits, sample_of, tokens_of
from torch import Tensor
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from agentkv.core.token_counter import TokenCounter
from agentkv.core.token_rules import TokenRules
from agentkv.model.sampler import Sampler
from agentkv.sampling_params import SamplingParams

ALONE_AND_TOGETHER: list[dict[str, Any]] = [
    {},
    {"temperature": 1.7},
    {"top_k": 6},
    {"top_p": 0.8},
    {"min_p": 0.05},
    {"typical_p": 0.7},
    {"repetition_penalty": 1.8},
    {"presence_penalty": 1.0},
    {"frequency_penalty": 0.7},
    {"logit_bias": ((2, 2.0), (9, -1.0))},
    {"allowed_token_ids": (1, 4, 5, 11)},
    {"banned_token_ids": (3, 12)},
    {"temperature": 1.5, "top_k": 9, "top_p": 0.95, "min_p": 0.01, "typical_p": 0.95,
     "repetition_penalty": 1.3, "presence_penalty": 0.2, "frequency_penalty": 0.1,
     "logit_bias": ((0, 1.0),), "banned_token_ids": (7,)},
]  # fmt: skip
SEEN = [0, 1, 1, 4, 9]


def by_transformers(chosen: SamplingParams, logits: Tensor) -> Tensor:
    """The distribution that transformers' processors leave, (vocab_size,)."""
    steps: list[Any] = []
    if chosen.logit_bias:
        biases: Any = [[[token], bias] for token, bias in chosen.logit_bias]
        steps.append(SequenceBiasLogitsProcessor(biases))
    steps.append(RepetitionPenaltyLogitsProcessor(chosen.repetition_penalty))
    counts = torch.bincount(torch.tensor(SEEN), minlength=logits.shape[1])
    steps.append(lambda _, scores: scores - chosen.frequency_penalty * counts
                 - chosen.presence_penalty * (counts > 0))  # fmt: skip
    if chosen.banned_token_ids:
        steps.append(SuppressTokensLogitsProcessor(list(chosen.banned_token_ids), device="cpu"))
    if chosen.allowed_token_ids:
        others = sorted(set(range(logits.shape[1])).difference(chosen.allowed_token_ids))
        steps.append(SuppressTokensLogitsProcessor(others, device="cpu"))
    steps.append(TemperatureLogitsWarper(chosen.temperature))
    warpers: list[tuple[float | None, Any]] = [
        (chosen.top_k, TopKLogitsWarper),
        (chosen.top_p, TopPLogitsWarper),
        (chosen.min_p, MinPLogitsWarper),
        (chosen.typical_p, TypicalLogitsWarper),
    ]
    for value, warper in warpers:
        if value is not None:
            steps.append(warper(value))
    ids, scores = torch.tensor([SEEN]), logits.clone()
    for step in steps:
        scores = step(ids, scores)
    return scores[0].double().softmax(dim=-1)


@pytest.mark.parametrize("options", ALONE_AND_TOGETHER)
def test_draws_follow_the_distribution(sampler: Sampler, options: dict[str, Any]) -> None:
    """Catches a biased inversion, or an option left out: chi-square of 20 000 draws, p > 1e-4."""
    chosen = params(**options)
    logits = random_logits(1, vocab_size=13)
    expected = (20_000 * by_transformers(chosen, logits)).numpy()
    rules = TokenRules.of(chosen, 13)
    counts = TokenCounter(SEEN).snapshot() if chosen.has_penalties else None
    samples = [
        sample_of(chosen, ordinal=o % 100, at=o // 100)._replace(rules=rules, counts=counts)
        for o in range(20_000)
    ]
    drawn = tokens_of(sampler.sample(logits.expand(20_000, -1), samples))
    counts_drawn = np.bincount(drawn, minlength=13)
    assert counts_drawn[expected == 0].sum() == 0
    common = expected >= 5  # rarer ones are put together
    observed = np.append(counts_drawn[common], counts_drawn[~common].sum())
    wanted = np.append(expected[common], expected[~common].sum())
    keep = wanted > 0
    statistic = ((observed[keep] - wanted[keep]) ** 2 / wanted[keep]).sum()
    assert statistic < 40.0  # 12 degrees of freedom at most: p = 7e-5
