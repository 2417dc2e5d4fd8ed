"""Real engines on tiny random models, on a pool poisoned with NaN.

It owns how a test puts engine, runner and pool together, and how it looks at KV. It knows no
expected answer.
"""

import itertools
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from tiny_models import MAX_LENGTH, build_tiny_model
from tiny_tokenizers import build_tiny_tokenizer
from torch import Tensor
from transformers import PreTrainedModel

from agentkv.config import (
    LeaseConfig,
    LimitsConfig,
    PoolConfig,
    PressureConfig,
    SchedulerConfig,
)
from agentkv.core.block_pool import BlockPool
from agentkv.core.context_tree import ContextTree
from agentkv.engine.engine import Engine
from agentkv.engine.outputs import ModelFacts
from agentkv.engine.snapshot_store import SnapshotFolder
from agentkv.engine.tokenizer import Tokenizer
from agentkv.model.block_mover import BlockMover
from agentkv.model.disk_store import DiskStore
from agentkv.model.graph_sizes import Levels, levels
from agentkv.model.host_store import CompactStore
from agentkv.model.kv_cache import KVCache
from agentkv.model.kv_image import KVImages
from agentkv.model.loader import LoadedModel
from agentkv.model.model_runner import ModelRunner
from agentkv.model.model_shape import describe_model
from agentkv.model.sampler import Sampler
from agentkv_kernels.ops import Implementation

TEXT_VOCAB_SIZE = 300
"""Width of the logits of a model whose every generated token must be text: a byte each."""


class TinyEngine:
    """An engine, and the tensors behind its blocks."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        num_blocks: int = 64,
        block_size: int = 4,
        host_blocks: int = 0,
        rounds: bool = False,
        disk: DiskStore | None = None,
        disk_blocks: int = 0,
        scheduler: SchedulerConfig | None = None,
        max_length: int = MAX_LENGTH,
        implementation: Implementation | None = None,
        max_graph_rows: int | None = None,
        make_levels: Levels = levels,
        end_token_ids: Collection[int] = (),
        snapshot_folder: SnapshotFolder | None = None,
    ) -> None:
        """Puts an engine on a model; seeds are 1, 2, ...

        Args:
            model: Switched to AgentKV's attention, and left so.
            num_blocks: Blocks of the pool, all of them NaN.
            block_size: Token positions per block.
            host_blocks: Blocks of the host tier.
            rounds: Whether those are 8-bit.
            disk: Files below the host tier, closed by the caller.
            disk_blocks: How many of them.
            scheduler: Step sizes; the defaults if None.
            max_length: Longest context.
            implementation: Of the kernels; None takes the one for the device.
            max_graph_rows: Rows of the largest step that runs as a graph; None: none does.
            make_levels: Says how many programs graphs start.
            end_token_ids: Tokens that end a generation; none does otherwise.
            snapshot_folder: Where contexts can be saved; None: nowhere.
        """
        shape = describe_model(model)
        self.kv = KVCache(shape, num_blocks=num_blocks, block_size=block_size)
        self.kv.poison(float("nan"))
        self.runner = ModelRunner(model, self.kv, Sampler(), implementation=implementation)
        if max_graph_rows is not None:
            self.runner.capture_graphs(max_graph_rows, lambda _: None, make_levels=make_levels)
        self.host = CompactStore(self.kv, host_blocks, rounds=rounds)
        numbers, seeds = itertools.count(), itertools.count(1)
        self.engine = Engine(
            self.runner,
            ModelFacts(
                name="tiny",
                architecture=type(model).__name__,
                vocab_size=shape.vocab_size,
                max_length=max_length,
                num_layers=shape.num_layers,
                dtype="float32",
                bytes_per_block=self.kv.bytes_per_block,
                has_chat_template=True,
            ),
            Tokenizer(build_tiny_tokenizer()),
            pool=PoolConfig(
                num_blocks=num_blocks,
                block_size=block_size,
                host_blocks=host_blocks,
                disk_blocks=disk_blocks,
            ),
            scheduler=scheduler or SchedulerConfig(),
            limits=LimitsConfig(),
            leases=LeaseConfig(),
            pressure=PressureConfig(),
            end_token_ids=frozenset(end_token_ids),
            porter=KVImages(self.kv),
            snapshot_folder=snapshot_folder,
            new_id=lambda: f"c{next(numbers)}",
            new_seed=lambda: next(seeds),
            mover=BlockMover(self.host, disk),
            timer=lambda: 0.0,
        )
        self._tree: ContextTree = self.engine._tree

    @property
    def pool(self) -> BlockPool:
        """Who counts on which block."""
        return self._tree.pool

    def tokens(self, tenant: str, context_id: str) -> list[int]:
        """Reads the committed tokens of a context."""
        context = self.engine._store.get(tenant, context_id)
        return list(self._tree.tokens(context.tail))[: context.length]

    def head(self, tenant: str, context_id: str) -> Tensor | None:
        """Finds the logits kept after a context's last token, (vocab_size,), or None."""
        context = self.engine._store.get(tenant, context_id)
        head = self._tree.heads.get(context.tail) if context.length == context.tail.end else None
        assert head is None or isinstance(head, Tensor)
        return head

    def drop_heads(self) -> None:
        """Forgets all kept logits, as if many other contexts had been used since."""
        for segment in self._tree:
            self._tree.heads.drop(segment)

    def blocks(self, tenant: str, context_id: str) -> list[int]:
        """Lists the block table of a context."""
        path = self._tree.path(self.engine._store.get(tenant, context_id).tail)
        size = self._tree.block_size
        table: dict[int, int] = {}
        for segment in path:
            first = segment.start // size
            table |= {first + number: block for number, block in enumerate(segment.blocks)}
        return [table[number] for number in sorted(table)]

    def content(self, block_ids: list[int]) -> Tensor:
        """Copies the KV of blocks, all layers, flattened to one dimension."""
        parts = (part for layer in range(self.kv.shape.num_layers) for part in self.kv.layer(layer))
        return torch.cat([part[block_ids].flatten() for part in parts])

    def poison_free(self) -> None:
        """Overwrites every free block with NaN, so that whoever still reads one is found out."""
        free = [block for block in range(self.pool.num_blocks) if not self.pool.count(block)]
        for layer in range(self.kv.shape.num_layers):
            for part in self.kv.layer(layer):
                part[free] = float("nan")


def load_tiny(family: str = "llama", **changes: Any) -> LoadedModel:
    """Makes what the loader would answer for a tiny model whose tokens are bytes of text."""
    model = build_tiny_model(family, vocab_size=TEXT_VOCAB_SIZE, **changes)
    return LoadedModel(
        name=f"tiny-{family}",
        model=model,
        tokenizer=build_tiny_tokenizer(),
        folder=Path(),
        architecture=type(model).__name__,
        vocab_size=TEXT_VOCAB_SIZE,
        max_length=MAX_LENGTH,
        num_layers=2,
        dtype=torch.float32,
        device=torch.device("cpu"),
        eos_token_ids=(2,),
        weight_bytes=sum(weight.nbytes for weight in model.parameters()),
    )
