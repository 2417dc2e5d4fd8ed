"""Filters and inversion in torch: what transformers leaves stays, and each number has its token."""

from typing import Any

import pytest
import torch
from logit_rows import VOCAB_SIZE, params, random_logits
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from agentkv.model.draw import invert
from agentkv.model.filters import filtered_weights

FILTERS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.3},
    {"temperature": 2.5},
    {"top_k": 12},
    {"top_k": 10**6},
    {"top_p": 0.7},
    {"top_p": 1e-9},
    {"min_p": 0.02},
    {"min_p": 1.0},
    {"typical_p": 0.6},
    {"typical_p": 1e-9},
    {"typical_p": 0.99, "temperature": 2.0},
    {"temperature": 0.8, "top_k": 30, "top_p": 0.9, "min_p": 0.01},
    {"temperature": 1.4, "top_k": 60, "top_p": 0.95, "min_p": 0.01, "typical_p": 0.8},
]


@pytest.mark.parametrize("options", FILTERS)
def test_the_filtered_distribution_is_that_of_transformers(options: dict[str, Any]) -> None:
    """Catches filters in another order, or a boundary token more or less."""
    chosen = params(**options)
    logits = random_logits(50)
    warpers: list[Any] = [TemperatureLogitsWarper(chosen.temperature)]
    if chosen.top_k is not None:
        warpers.append(TopKLogitsWarper(min(chosen.top_k, VOCAB_SIZE)))
    if chosen.top_p is not None:
        warpers.append(TopPLogitsWarper(chosen.top_p))
    if chosen.min_p is not None:
        warpers.append(MinPLogitsWarper(chosen.min_p))
    if chosen.typical_p is not None:
        warpers.append(TypicalLogitsWarper(chosen.typical_p))
    no_ids: Any = None
    expected = LogitsProcessorList(warpers)(no_ids, logits.double()).softmax(dim=-1)
    scores = logits.double()
    scores = (scores - scores.amax(dim=-1, keepdim=True)) / chosen.temperature
    weights = filtered_weights(scores, [chosen] * 50).double()
    assert not weights[expected == 0].any()  # what they drop we drop
    assert weights[expected > 1e-12].all()  # and the reverse, down to our resolution
    shares = weights / weights.sum(dim=-1, keepdim=True)
    torch.testing.assert_close(shares, expected, rtol=0, atol=1e-12)


def test_filters_of_one_row_leave_the_others_alone() -> None:
    """Catches a filter applied to the wrong row of a mixed batch."""
    mixed = [params(**options) for options in FILTERS]
    logits = random_logits(len(mixed)).double()
    scores = logits - logits.amax(dim=-1, keepdim=True)
    together = filtered_weights(scores.clone(), mixed)
    for row, chosen in enumerate(mixed):
        assert torch.equal(together[row], filtered_weights(scores[[row]], [chosen])[0])


def test_top_p_keeps_the_lowest_ids_of_equals() -> None:
    """Catches a set at the edge of top-p that depends on a sort's whim."""
    weights = filtered_weights(torch.zeros(1, 8, dtype=torch.float64), [params(top_p=0.5)])
    assert (weights[0] > 0).tolist() == [True] * 4 + [False] * 4


@pytest.mark.parametrize("width", [1, 5, 64, 65, 300])
def test_inversion_finds_the_token_of_each_number(width: int) -> None:
    """Catches a token of no weight that is drawn, and an edge that belongs to the wrong token."""
    weights = torch.arange(width, dtype=torch.float64)[None] % 3
    weights[0, -1] = 2.0
    total = int(weights.sum())
    numbers = torch.arange(total, dtype=torch.float64) / total + 1e-9
    found = invert(weights.expand(total, -1), numbers)
    expected = torch.repeat_interleave(torch.arange(width), weights[0].long())
    assert torch.equal(found, expected)
