"""Rows of random logits, and what is asked of them, for tests of the sampler."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from agentkv.core.batch import Sample, Sampled, Stream
from agentkv.sampling_params import SamplingParams

VOCAB_SIZE = 211


def params(**options: Any) -> SamplingParams:
    """Options with a temperature of 1 unless they name another."""
    return SamplingParams(**({"temperature": 1.0} | options))


def sample_of(options: SamplingParams, *, seed: int = 42, ordinal: int = 0, at: int = 20) -> Sample:
    """What one row asks for."""
    return Sample(row=0, head=None, params=options, stream=Stream(seed, ordinal), position=at)


def random_logits(num_rows: int, *, seed: int = 0, vocab_size: int = VOCAB_SIZE) -> Tensor:
    """Logits of some rows, (num_rows, vocab_size)."""
    generator = torch.Generator().manual_seed(seed)
    return 3 * torch.randn(num_rows, vocab_size, generator=generator)


def tokens_of(sampled: Sequence[Sampled]) -> list[int]:
    """The chosen tokens."""
    return [each.token for each in sampled]
