"""An engine without a model: all bookkeeping is real, and no tensor is touched.

Forking and filling blocks cost what core and engine make them cost, so that is what is measured,
for contexts far longer than a model on this machine could run. It measures nothing itself.
"""

import itertools
import time
from collections.abc import Callable
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
from agentkv.engine.runner import Mover, Runner
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

    def run(self, batch: Batch, meanwhile: Callable[[], None]) -> StepResult:
        """Answers in the order of the batch."""
        meanwhile()
        self.copies += batch.copies
        return StepResult(
            tuple(Sampled(sample.position % VOCAB_SIZE, None) for sample in batch.samples),
            tuple(0 for _ in batch.heads),
            tuple(0.0 for _ in batch.scores),
        )


LARGE_STEPS = SchedulerConfig(token_budget=4096, chunk_size=2048)
"""For a run that is about bookkeeping alone."""


def hollow_engine(
    runner: Runner,
    *,
    num_blocks: int,
    max_length: int,
    vocab_size: int = VOCAB_SIZE,
    max_contexts: int = 100_000,
    max_depth: int = 4096,
    scheduler: SchedulerConfig = LARGE_STEPS,
    pin_quota: float = 0.5,
    host_blocks: int = 0,
    mover: Mover | None = None,
    clock: Callable[[], float] = time.time,
    timer: Callable[[], float] = time.monotonic,
) -> Engine:
    """Puts an engine on a runner, with a tokenizer whose texts mean nothing.

    Args:
        runner: A runner without a model, or one with a model whose texts nobody reads.
        num_blocks: Blocks of the pool.
        max_length: Most tokens of a context.
        vocab_size: Token ids are below it.
        max_contexts: Contexts a tenant may hold.
        max_depth: Forks between a context and its root.
        scheduler: Sizes of steps.
        pin_quota: Share of the pool that a tenant may pin.
        host_blocks: Blocks of the host tier.
        mover: Carries blocks to it; needed if there are any.
        clock: Seconds since the epoch, for leases.
        timer: Seconds since any time, for bills.
    """
    numbers = itertools.count()
    words: Any = tokenizers.models.WordLevel({"word": 0}, unk_token="word")
    untyped: Any = PreTrainedTokenizerFast  # the library does not type its constructor
    return Engine(
        runner,
        ModelFacts(
            name="hollow",
            architecture="none",
            vocab_size=vocab_size,
            max_length=max_length,
            num_layers=0,
            dtype="none",
            bytes_per_block=BYTES_PER_TOKEN * BLOCK_SIZE,
            has_chat_template=False,
        ),
        Tokenizer(untyped(tokenizer_object=tokenizers.Tokenizer(words))),
        pool=PoolConfig(num_blocks=num_blocks, block_size=BLOCK_SIZE, host_blocks=host_blocks),
        scheduler=scheduler,
        limits=LimitsConfig(max_contexts=max_contexts, max_depth=max_depth),
        leases=LeaseConfig(pin_quota=pin_quota),
        pressure=PressureConfig(),
        end_token_ids=frozenset(),
        new_id=lambda: f"c{next(numbers)}",
        new_seed=lambda: 1,
        clock=clock,
        timer=timer,
        mover=mover,
    )
