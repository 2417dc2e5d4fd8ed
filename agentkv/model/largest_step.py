"""The step that takes the most memory: what a pool must leave room for.

Every row is computed, sampled with every option, and scored. It is run once at start, on a small
pool of its own.
"""

from dataclasses import replace
from typing import NamedTuple

import torch
from transformers import PreTrainedModel

from agentkv.core.batch import Batch, Sample, Score, Stream
from agentkv.core.token_rules import mask_of
from agentkv.model.hand_batch import BranchRows, Piece, batch_of
from agentkv.model.kv_cache import KVCache
from agentkv.model.model_runner import ModelRunner, TokenSampler
from agentkv.model.model_shape import ModelShape
from agentkv.sampling_params import MAX_TOP_LOGPROBS, SamplingParams

_FILTERED = SamplingParams(
    temperature=1.0,
    top_k=64,
    top_p=0.9,
    min_p=0.01,
    typical_p=0.9,
    logprobs=True,
    top_logprobs=MAX_TOP_LOGPROBS,
)


class StepSize(NamedTuple):
    """What bounds a step."""

    num_rows: int
    """Rows at most, the token budget."""
    max_length: int
    """Tokens of a context at most: no position is above."""
    block_size: int
    """Token positions per block."""


def run_largest_step(
    model: PreTrainedModel,
    shape: ModelShape,
    sampler: TokenSampler,
    size: StepSize,
    *,
    kv_dtype: torch.dtype | None = None,
    batch_invariant: bool = False,
) -> None:
    """Makes a pool, runs the largest step on it and forgets both.

    Args:
        model: As described by `shape`.
        shape: Of the model.
        sampler: The one that will serve.
        size: Of the step.
        kv_dtype: As for `KVCache`.
        batch_invariant: As for `ModelRunner`.
    """
    batch = largest_batch(size)
    masks = (mask_of(range(shape.vocab_size), shape.vocab_size),)  # edits work on a copy of logits
    batch = replace(batch, samples=tuple(each._replace(masks=masks) for each in batch.samples))
    num_blocks = sum(len(run.block_ids) for run in batch.runs)
    kv = KVCache(shape, num_blocks=num_blocks, block_size=size.block_size, dtype=kv_dtype)
    runner = ModelRunner(model, kv, sampler, batch_invariant=batch_invariant)
    runner.run(batch)


def largest_batch(size: StepSize) -> Batch:
    """Lays out prompts that fill a step, in contexts as long as they may be."""
    branches: list[BranchRows] = []
    first_block = 0
    for begin in range(0, size.num_rows, size.max_length):
        length = min(size.max_length, size.num_rows - begin)
        blocks = range(first_block, first_block + -(-length // size.block_size))
        first_block = blocks.stop
        path = (Piece(len(branches), 0, length, tuple(blocks)),)
        branches.append(BranchRows((0,) * length, 0, path))
    return batch_of(
        branches,
        block_size=size.block_size,
        samples=[Sample(row, None, _FILTERED, Stream(0, 0), 1) for row in range(size.num_rows)],
        scores=[Score(row, None, 0) for row in range(size.num_rows)],
    )
