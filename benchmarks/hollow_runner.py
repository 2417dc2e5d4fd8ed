"""An engine without a model: all bookkeeping is real, and no tensor is touched.

Forking and filling blocks cost what core and engine make them cost, so that is what is measured,
for contexts far longer than a model on this machine could run. It measures nothing itself.
"""

import itertools
from typing import Any

import tokenizers
from transformers import PreTrainedTokenizerFast

from agentkv.config import (
    LeaseConfig,
    LimitsConfig,
    PoolConfig,
    PressureConfig,
    SchedulerConfig,
)
from agentkv.core.batch import Batch, BlockCopy, Sampled, StepResult
from agentkv.engine.engine import Engine
from agentkv.engine.outputs import ModelFacts
from agentkv.engine.tokenizer import Tokenizer

VOCAB_SIZE = 1000
BYTES_PER_TOKEN = 23_040
"""Of KV, for every `BlockCopy` counted: SmolLM2-135M in bf16."""
BLOCK_SIZE = 16


class HollowRunner:
    """Answers every step at once, with tokens that mean nothing, and notes its copies."""

    def __init__(self) -> None:
        self.copies: list[BlockCopy] = []

    @property
    def bytes_copied(self) -> int:
        """Bytes of KV that the copies asked for would have moved."""
        return sum(copy.num_tokens for copy in self.copies) * BYTES_PER_TOKEN

    def run(self, batch: Batch) -> StepResult:
        """Answers in the order of the batch."""
        self.copies += batch.copies
        return StepResult(
            tuple(Sampled(sample.position % VOCAB_SIZE, None) for sample in batch.samples),
            tuple(0 for _ in batch.heads),
            tuple(0.0 for _ in batch.scores),
        )


def hollow_engine(
    runner: HollowRunner, *, num_blocks: int, max_length: int, max_contexts: int = 100_000
) -> Engine:
    """Puts an engine on a runner without a model."""
    numbers = itertools.count()
    words: Any = tokenizers.models.WordLevel({"word": 0}, unk_token="word")
    untyped: Any = PreTrainedTokenizerFast  # the library does not type its constructor
    return Engine(
        runner,
        ModelFacts(
            name="hollow",
            architecture="none",
            vocab_size=VOCAB_SIZE,
            max_length=max_length,
            num_layers=0,
            dtype="none",
            bytes_per_block=BYTES_PER_TOKEN * BLOCK_SIZE,
            has_chat_template=False,
        ),
        Tokenizer(untyped(tokenizer_object=tokenizers.Tokenizer(words))),
        pool=PoolConfig(num_blocks=num_blocks, block_size=BLOCK_SIZE),
        scheduler=SchedulerConfig(token_budget=4096, chunk_size=2048),
        limits=LimitsConfig(max_contexts=max_contexts),
        leases=LeaseConfig(),
        pressure=PressureConfig(),
        end_token_ids=frozenset(),
        new_id=lambda: f"c{next(numbers)}",
        new_seed=lambda: 1,
    )
