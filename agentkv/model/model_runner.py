"""Turns one Batch into tensors, runs the model, and answers with tokens and log-probabilities.

Order of a step: the batch's copies, then the model (each layer stores this step's K and V and
attends), then sampling. The runner decides nothing: which rows, blocks and tokens take part is in
the Batch. It keeps nothing between steps but the AttentionPlan; kept logits belong to whoever asked
for them.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from agentkv.core.batch import NO_SLOT, Batch, Sample, Sampled, Score, StepResult
from agentkv.model.attention import LayerCall, check_called_once, forward
from agentkv.model.attention_plan import AttentionPlanner
from agentkv.model.kv_cache import KVCache
from agentkv_kernels import AttentionPlan, store_kv, tree_attention
from agentkv_kernels.ops import Implementation

_Asked = TypeVar("_Asked", Sample, Score)

SLICE_BYTES = 32 * 1024 * 1024
"""Most bytes of logits converted and reduced at once; a sampler may hold a few such arrays."""


class TokenSampler(Protocol):
    """What the runner needs of a sampler; passed in, so that tests can force tokens."""

    def sample(self, logits: Tensor, samples: Sequence[Sample]) -> list[Sampled]:
        """Chooses one token per row of logits, (n, vocab_size) fp32."""
        ...

    def token_logprobs(self, logits: Tensor, tokens: Sequence[int]) -> list[float]:
        """Finds the log-probability of one given token per row of logits, (n, vocab_size) fp32."""
        ...


@dataclass(frozen=True, slots=True)
class RunnerStatistics:
    """What a runner did since it was made."""

    num_steps: int
    num_rows: int
    """Query tokens the model computed."""
    num_plan_builds: int
    """Steps that made a new AttentionPlan."""
    num_plan_advances: int
    """Steps that went on with the plan of the step before."""


class ModelRunner:
    """Runs Batches on one model and one pool.

    Invariants: copies come before writes; every layer attends exactly once per step; at most
    `slice_bytes` of logits are converted or reduced at a time.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        kv: KVCache,
        sampler: TokenSampler,
        *,
        implementation: Implementation | None = None,
        slice_bytes: int = SLICE_BYTES,
    ) -> None:
        """Pairs a model with its pool.

        Args:
            model: The one that `kv.shape` was taken from.
            kv: The device pool.
            sampler: Chooses tokens from logits.
            implementation: Of the kernels: `reference` is the specification, and slow; None takes
                the one for the device.
            slice_bytes: Most bytes of fp32 logits that one call of the sampler sees.
        """
        self.kv = kv
        self._model = model
        self._sampler = sampler
        self._implementation = implementation
        self._slice_bytes = slice_bytes
        self._planner = AttentionPlanner(kv.block_size)
        self._num_steps = 0
        self._num_rows = 0

    def run(self, batch: Batch) -> StepResult:
        """Computes one step.

        Args:
            batch: May have no rows, when all that is asked comes from kept heads.

        Returns:
            Tokens, kept logits and log-probabilities in the order of the batch. A kept head is an
            fp32 tensor (vocab_size,) of its own memory on the model's device.

        Raises:
            UnsupportedModelError: The model did something at this step that load did not show.
        """
        with torch.inference_mode():
            self.kv.copy(batch.copies)
            asked = _asked_rows(batch)
            logits = self._forward(batch, asked) if batch.num_rows else None
            source = _LogitSource(logits, asked, self._slice_bytes)
            result = StepResult(
                samples=tuple(self._sample(source, batch.samples)),
                heads=tuple(source.keep(row) for row in batch.heads),
                scores=tuple(self._score(source, batch.scores)),
            )
        self._num_steps += 1
        self._num_rows += batch.num_rows
        return result

    def statistics(self) -> RunnerStatistics:
        """Counts what was done so far."""
        return RunnerStatistics(
            num_steps=self._num_steps,
            num_rows=self._num_rows,
            num_plan_builds=self._planner.num_builds,
            num_plan_advances=self._planner.num_advances,
        )

    def _forward(self, batch: Batch, asked: Sequence[int]) -> Tensor:
        device = self.kv.shape.device
        token_ids, positions, slots = torch.tensor(
            [batch.token_ids, batch.positions, batch.slots], dtype=torch.int64, device=device
        )
        step = _PagedStep(
            self.kv,
            self._planner.plan(batch),
            slots,
            is_writing=any(slot != NO_SLOT for slot in batch.slots),
            implementation=self._implementation,
        )
        rows = torch.tensor(asked, dtype=torch.int64, device=device)
        logits = forward(self._model, step, token_ids, positions, rows)
        check_called_once(self._model, step.layers, self.kv.shape.num_layers)
        return logits

    def _sample(self, source: "_LogitSource", samples: Sequence[Sample]) -> Iterator[Sampled]:
        for part in source.slices(samples):
            yield from self._sampler.sample(source.gather(part), part)

    def _score(self, source: "_LogitSource", scores: Sequence[Score]) -> Iterator[float]:
        for part in source.slices(scores):
            tokens = [score.token for score in part]
            yield from self._sampler.token_logprobs(source.gather(part), tokens)


def _asked_rows(batch: Batch) -> list[int]:
    """Lists the rows whose logits anything of the batch needs, ascending."""
    rows = {sample.row for sample in batch.samples} | {score.row for score in batch.scores}
    return sorted(row for row in rows.union(batch.heads) if row is not None)


class _LogitSource:
    """Logits of this step's rows and of heads kept by earlier steps, as one supply."""

    def __init__(self, logits: Tensor | None, rows: Sequence[int], slice_bytes: int) -> None:
        self._logits = logits  # (len(rows), vocab_size), or None when nothing ran
        self._index_of = {row: index for index, row in enumerate(rows)}
        self._slice_bytes = slice_bytes

    def keep(self, row: int) -> Tensor:
        """Copies a row's logits out of the step."""
        return self._row(row).to(torch.float32, copy=True)

    def slices(self, asked: Sequence[_Asked]) -> Iterator[Sequence[_Asked]]:
        """Cuts a list into parts whose logits stay below the bound."""
        if not asked:
            return
        vocab_size = self._of(asked[0]).shape[-1]
        step = max(1, self._slice_bytes // (4 * vocab_size))
        for start in range(0, len(asked), step):
            yield asked[start : start + step]

    def gather(self, asked: Sequence[Sample] | Sequence[Score]) -> Tensor:
        """Collects the logits of each, (len(asked), vocab_size) fp32."""
        rows = [item.row for item in asked if item.row is not None]
        if len(rows) < len(asked):
            return torch.stack([self._of(item).float() for item in asked])
        assert self._logits is not None
        indices = torch.tensor([self._index_of[row] for row in rows], device=self._logits.device)
        return self._logits.index_select(0, indices).float()

    def _of(self, asked: Sample | Score) -> Tensor:
        if asked.row is not None:
            return self._row(asked.row)
        assert isinstance(asked.head, Tensor), "neither a row nor a kept head"
        return asked.head

    def _row(self, row: int) -> Tensor:
        assert self._logits is not None, "a row is asked for, but the batch has none"
        return self._logits[self._index_of[row]]


class _PagedStep:
    """One forward pass: where each layer's KV goes, and what each row reads."""

    def __init__(
        self,
        kv: KVCache,
        plan: AttentionPlan,
        slots: Tensor,  # (num_rows,) int64, NO_SLOT where nothing is written
        *,
        is_writing: bool,
        implementation: Implementation | None,
    ) -> None:
        self.layers: list[int] = []
        self._kv = kv
        self._plan = plan
        self._slots = slots
        self._is_writing = is_writing
        self._implementation = implementation

    def attend(self, call: LayerCall) -> Tensor:
        """Stores the layer's new K and V unless another layer's serve it, then attends."""
        self.layers.append(call.layer)
        key_cache, value_cache = self._kv.layer(call.layer)
        if self._is_writing and self._kv.owns_kv(call.layer):
            store_kv(call.key, call.value, key_cache, value_cache, self._slots)
        return tree_attention(
            call.query,
            key_cache,
            value_cache,
            self._plan,
            scale=call.scale,
            window=call.window,
            softcap=call.softcap,
            sinks=call.sinks,
            implementation=self._implementation,
        )
