"""Edits of single tokens: equal to transformers' processors, on the rows that ask alone."""

from array import array
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensLogitsProcessor,
)

from agentkv.core.batch import Sample, Stream
from agentkv.core.token_counter import TokenCounter
from agentkv.core.token_rules import TokenRules, mask_of
from agentkv.model.logit_edits import apply_masks, edit_logits, has_edits
from agentkv.sampling_params import SamplingParams

VOCAB_SIZE = 211
SEEN = [5, 9, 5, 77, 210, 0, 5, 9]


def logits_of(num_rows: int) -> Tensor:
    return 3 * torch.randn(num_rows, VOCAB_SIZE, generator=torch.Generator().manual_seed(3))


def sample_of(*, seen: Sequence[int] = (), masks: tuple[bytes, ...] = (), **options: Any) -> Sample:
    params = SamplingParams(**options)
    return Sample(
        row=0,
        head=None,
        params=params,
        stream=Stream(1, 0),
        position=8,
        rules=TokenRules.of(params, VOCAB_SIZE),
        masks=masks,
        counts=TokenCounter(seen).snapshot() if params.has_penalties else None,
    )


def edited(logits: Tensor, *samples: Sample) -> Tensor:
    scores = logits.clone()
    edit_logits(scores, samples)
    return scores


@pytest.mark.parametrize("penalty", [0.5, 1.3, 4.0])
def test_repetition_penalty_is_that_of_transformers(penalty: float) -> None:
    """Catches a penalty that rewards tokens with negative logits, or counts repeats twice."""
    logits = logits_of(1)
    processor = RepetitionPenaltyLogitsProcessor(penalty)
    expected = processor(torch.tensor([SEEN]), logits.clone())
    assert torch.equal(edited(logits, sample_of(repetition_penalty=penalty, seen=SEEN)), expected)


def test_presence_and_frequency_are_subtracted_once_and_for_each_time() -> None:
    """Catches the two mixed up, a wrong sign, and tokens lowered that did not occur."""
    logits = logits_of(1)
    found = edited(logits, sample_of(presence_penalty=0.5, frequency_penalty=0.25, seen=SEEN))
    counts = torch.bincount(torch.tensor(SEEN), minlength=VOCAB_SIZE)
    expected = logits - 0.25 * counts - 0.5 * (counts > 0)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


def test_bias_and_bans_are_those_of_transformers() -> None:
    """Catches a bias on a neighbour of its token, and a ban that only lowers."""
    logits, banned = logits_of(1), [4, 200, 8]
    ids = torch.tensor([SEEN])
    biases = SequenceBiasLogitsProcessor([[[3], 2.5], [[210], -7.0]])
    bans = NoBadWordsLogitsProcessor([[token] for token in banned], eos_token_id=None)
    expected = bans(ids, biases(ids, logits.clone()))
    pairs = ((3, 2.5), (210, -7.0))
    found = edited(logits, sample_of(logit_bias=pairs, banned_token_ids=tuple(banned)))
    assert torch.equal(found, expected)
    suppressed = SuppressTokensLogitsProcessor(banned, device="cpu")
    assert torch.equal(suppressed(ids, biases(ids, logits.clone())), expected)


def test_only_allowed_tokens_stay() -> None:
    """Catches bits read in another order, and tokens at the end of the last word."""
    logits, allowed = logits_of(1), (0, 7, 8, 63, 210)
    found = edited(logits, sample_of(allowed_token_ids=allowed))
    assert found[0].isfinite().nonzero().flatten().tolist() == list(allowed)
    assert torch.equal(found[0, list(allowed)], logits[0, list(allowed)])


def test_a_token_must_be_in_every_mask() -> None:
    """Catches a second mask (a grammar's) that replaces the first or allows again."""
    masks = (mask_of([1, 2, 3], VOCAB_SIZE), mask_of([2, 3, 4, 9], VOCAB_SIZE))
    found = edited(logits_of(1), sample_of(allowed_token_ids=(2, 4, 9), masks=masks))
    assert found[0].isfinite().nonzero().flatten().tolist() == [2]


def test_a_mask_may_be_wider_than_the_vocabulary() -> None:
    """Catches a mask of whole words taken for one of the wrong size."""
    scores = logits_of(1)
    apply_masks(scores, [0], [mask_of([210], VOCAB_SIZE) + b"\xff" * 8])
    assert scores[0].isfinite().nonzero().flatten().tolist() == [210]


def test_rows_do_not_touch_each_other() -> None:
    """Catches an edit that lands in a neighbour's row, or on the row without any."""
    samples = [
        sample_of(),
        sample_of(repetition_penalty=1.5, frequency_penalty=0.5, seen=SEEN),
        sample_of(logit_bias=((0, 1.0),), banned_token_ids=(210,)),
        sample_of(allowed_token_ids=(5, 6)),
        sample_of(presence_penalty=1.0, seen=[7]),
        sample_of(presence_penalty=1.0),
    ]
    logits = logits_of(len(samples))
    together = edited(logits, *samples)
    for row, sample in enumerate(samples):
        alone = edited(logits[row : row + 1], sample)
        assert torch.equal(together[row], alone[0])
    assert torch.equal(together[0], logits[0])
    assert torch.equal(together[5], logits[5])
    assert [has_edits(sample) for sample in samples] == [False] + [True] * 5


def test_rules_say_nothing_when_options_do() -> None:
    """Catches arrays made for every plain request, and bans that are lost by further ones."""
    assert TokenRules.of(SamplingParams(), VOCAB_SIZE) is None
    rules = TokenRules.of(SamplingParams(banned_token_ids=(3,)), VOCAB_SIZE)
    assert TokenRules.banning(rules, [9]).banned_ids == array("I", [3, 9])
    assert TokenRules.banning(None, [9]).banned_ids == array("I", [9])
