"""The native kernels that choose tokens: they do what the same in torch does, at every level."""

import math
import random
from typing import Any

import pytest
import torch
from logit_rows import params, random_logits
from torch import Tensor

from agentkv.core.token_rules import mask_of
from agentkv.model.draw import draw_tokens
from agentkv.model.filters import filtered_weights
from agentkv.model.logit_edits import apply_masks
from agentkv.model.logprobs import by_torch, normalisers
from agentkv.sampling_params import SamplingParams
from agentkv_kernels import native
from agentkv_kernels.drawing import Choice, Drawing

LEVELS = native.available_levels()


@pytest.fixture(params=dict.fromkeys([*LEVELS[:1], *LEVELS[-1:]]), scope="module")
def drawing(request: pytest.FixtureRequest) -> Drawing:
    """The kernels of the best level and of the last; those between are compiled to the latter."""
    return Drawing(native.native_at(request.param))


def choice_of(options: SamplingParams, number: float) -> Choice:
    return Choice(
        number,
        options.temperature,
        options.top_k or 0,
        options.top_p or 1.0,
        options.min_p or 0.0,
        options.typical_p or 1.0,
    )


def drawn(drawing: Drawing, logits: Tensor, options: SamplingParams, numbers: Tensor) -> list[int]:
    choices = [choice_of(options, number) for number in numbers.tolist()]
    tokens: list[int] = drawing.choose(logits, choices).tokens.tolist()
    return tokens


def rows_of(kind: str, vocab_size: int, seed: int) -> Tensor:
    """Three rows of logits: dense in float32, with ties, flat, or with one token or few."""
    logits = random_logits(3, seed=seed, vocab_size=vocab_size)
    if kind == "ties":
        return logits.round()
    if kind == "flat":
        return torch.full_like(logits, -7.5)
    if kind == "few":
        few = torch.full_like(logits, -math.inf)
        few[:, :: max(1, vocab_size // 3)] = logits[:, :: max(1, vocab_size // 3)]
        return few
    if kind == "one":
        return torch.full_like(logits, -math.inf).index_fill_(1, torch.tensor(vocab_size - 1), 1e-3)
    return logits


SIZES = [1, 2, 3, 15, 63, 64, 65, 200, 1000, 12_001]


def random_options(dice: random.Random, vocab_size: int) -> dict[str, Any]:
    options: dict[str, Any] = {"temperature": dice.choice([1.0, 0.3, 2.5, 100.0, 1e-8, 5e-324])}
    if dice.random() < 0.4:
        options["top_k"] = dice.choice([2, 5, 50, 700, vocab_size, vocab_size + 1])
    if dice.random() < 0.5:
        options["top_p"] = dice.choice([1e-9, 0.5, 0.9, 0.999, 1.0])
    if dice.random() < 0.3:
        options["min_p"] = dice.choice([0.0, 1e-12, 1e-7, 0.05, 0.5, 1.0])
    if dice.random() < 0.3:
        options["typical_p"] = dice.choice([1e-9, 0.5, 0.9, 0.999])
    return options


@pytest.mark.parametrize("kind", ["dense", "ties", "flat", "few", "one"])
@pytest.mark.parametrize("vocab_size", SIZES)
def test_tokens_are_those_of_torch(drawing: Drawing, kind: str, vocab_size: int) -> None:
    """Catches an edge of a filter that a bound cuts off, and a block that is summed up twice."""
    dice = random.Random(vocab_size)
    for seed in range(12):
        logits = rows_of(kind, vocab_size, seed)
        options = params(**random_options(dice, vocab_size))
        numbers = torch.tensor([dice.random() for _ in range(3)], dtype=torch.float64)
        expected = draw_tokens(logits, [options] * 3, numbers).tolist()
        assert drawn(drawing, logits, options, numbers) == expected, (options, seed)


FILTERS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.7},
    {"top_k": 1000},
    {"top_p": 0.9},
    {"top_p": 0.9999, "temperature": 3.0},
    {"min_p": 1e-7},
    {"typical_p": 0.9},
    {"typical_p": 0.2, "temperature": 2.0},
    {"top_k": 40_000, "top_p": 0.99, "typical_p": 0.9},
    {"top_p": 0.8, "min_p": 0.05, "typical_p": 0.9, "temperature": 1.3},
]


@pytest.mark.parametrize("options", FILTERS)
def test_a_large_vocabulary(drawing: Drawing, options: dict[str, Any]) -> None:
    """Catches sums that run over, and lists longer than their memory."""
    logits = random_logits(4, vocab_size=200_003)
    logits[1] = logits[1].round()
    numbers = torch.tensor([0.0, 0.31, 0.77, 1 - 2**-53], dtype=torch.float64)
    expected = draw_tokens(logits, [params(**options)] * 4, numbers).tolist()
    assert drawn(drawing, logits, params(**options), numbers) == expected


@pytest.mark.parametrize("options", FILTERS)
@pytest.mark.parametrize("vocab_size", [7, 130])
def test_each_token_has_its_share_of_the_numbers(
    drawing: Drawing, options: dict[str, Any], vocab_size: int
) -> None:
    """Catches weights that are off by more than 2 units: draws right beside every edge."""
    chosen = params(**options)
    logits = random_logits(1, vocab_size=vocab_size, seed=4)
    cooled = (logits.double() - logits.amax().double()) / chosen.temperature
    weights = filtered_weights(cooled, [chosen])
    ends = weights.cumsum(dim=-1)[0]
    margin = 2.0 * vocab_size
    for edges, sign in ((ends - weights[0], 1), (ends, -1)):
        wanted = (weights[0] > 2 * margin).nonzero().squeeze(1)
        numbers = ((edges + sign * margin) / ends[-1])[wanted]
        rows = logits.expand(len(wanted), -1)
        assert drawn(drawing, rows, chosen, numbers) == wanted.tolist()


def test_all_levels_draw_the_same_tokens() -> None:
    """Catches sums whose rounding depends on the width of a vector."""
    logits = random_logits(64, vocab_size=5003)
    choices = [choice_of(params(**FILTERS[row % len(FILTERS)]), row / 64) for row in range(64)]
    found = [Drawing(native.native_at(level)).choose(logits, choices).tokens for level in LEVELS]
    assert all(torch.equal(each, found[0]) for each in found)


@pytest.mark.parametrize("vocab_size", [1, 5, 64, 131])
@pytest.mark.parametrize("bad", [math.nan, -math.nan, math.inf, -math.inf])
def test_the_greatest_is_that_of_torch(drawing: Drawing, vocab_size: int, bad: float) -> None:
    """Catches a NaN that a maximum passes over, and the last of equals."""
    logits = random_logits(vocab_size, vocab_size=vocab_size).round()
    logits.fill_diagonal_(bad)
    logits[0, -1] = -math.inf  # beside +inf, where there is room
    chosen = drawing.choose(logits, [choice_of(params(top_p=0.9), 0.5)] * vocab_size)
    expected = torch.from_numpy(logits.numpy().argmax(axis=-1))
    greatest = logits.gather(1, expected[:, None]).squeeze(1)
    assert torch.equal(chosen.greatest.nan_to_num(77.0), greatest.nan_to_num(77.0))
    is_bad = ~greatest.isfinite()
    assert torch.equal(chosen.tokens[is_bad], expected[is_bad])
    assert drawing.choose(logits, [Choice()] * vocab_size).tokens.tolist() == expected.tolist()


def test_rows_may_lie_apart(drawing: Drawing) -> None:
    """Catches an address that takes rows for dense, and scratch of a smaller vocabulary."""
    logits = random_logits(8, vocab_size=300)
    for rows in (logits[:, :70], logits[::2], logits[:1].expand(5, -1), logits[2:3, 5:6]):
        choices = [choice_of(params(typical_p=0.9), 0.1 * row) for row in range(len(rows))]
        found, same = drawing.choose(rows, choices), drawing.choose(rows.contiguous(), choices)
        assert torch.equal(found.tokens, same.tokens)


@pytest.mark.parametrize("vocab_size", [1, 20, 64, 200, 9001])
def test_the_most_likely_are_those_of_torch(drawing: Drawing, vocab_size: int) -> None:
    """Catches equals in another order, and tokens that may not be chosen among the most likely."""
    logits = random_logits(4, vocab_size=vocab_size)
    logits[1] = logits[1].round()
    logits[2, 3:] = -math.inf
    logits[3] = 0.0
    logits[3, ::2] = -0.0
    counts = [min(count, vocab_size) for count in (5, 64, 7, 20)]
    found, expected = drawing.most_likely(logits, counts), by_torch(logits, counts)
    for row, count in enumerate(counts):
        real = expected.logits[row, :count] > -math.inf
        ids = expected.token_ids[row, :count][real]
        assert torch.equal(found.token_ids[row, :count][real], ids)
        assert torch.equal(found.logits[row, :count], expected.logits[row, :count])
        assert (found.logits[row, count:] == -math.inf).all()


@pytest.mark.parametrize("vocab_size", [1, 63, 30_011])
def test_normalisers_are_those_of_float64(drawing: Drawing, vocab_size: int) -> None:
    """Catches sums in low precision, and padding that counts."""
    logits = 4 * random_logits(5, vocab_size=vocab_size)
    logits[1] = 3.0
    logits[2, : vocab_size // 2] = -math.inf
    logits[3] -= 1e4
    expected = logits.double().logsumexp(dim=-1)
    assert torch.allclose(drawing.normalisers(logits).double(), expected, rtol=1e-6, atol=1e-6)
    logits[4, 0] = math.nan
    logits[0, -1] = math.inf
    assert drawing.normalisers(logits).isnan().tolist() == normalisers(logits).isnan().tolist()


@pytest.mark.parametrize("vocab_size", [3, 64, 100, 9000])
def test_masks_are_those_of_torch(drawing: Drawing, vocab_size: int) -> None:
    """Catches bits in another order, a mask for another row, and a NaN that is masked away."""
    dice = random.Random(vocab_size)
    sets = [dice.sample(range(vocab_size), vocab_size // 2) for _ in range(3)]
    masks = [mask_of(each, vocab_size) for each in sets]
    logits = random_logits(4, vocab_size=vocab_size)
    logits[2, dice.randrange(vocab_size)] = math.nan
    expected = logits.clone()
    apply_masks(expected, [2, 0, 2], masks)
    drawing.mask(logits, [2, 0, 2], masks)
    assert torch.equal(logits.nan_to_num(nan=5.0), expected.nan_to_num(nan=5.0))
