"""Turns one Batch into tensors, runs the model, and answers with tokens and log-probabilities.

Order of a step: the batch's copies, then the model (each layer stores this step's K and V and
attends), then sampling. The runner decides nothing: which rows, blocks and tokens take part is in
the Batch. It keeps nothing between steps but the AttentionPlan; kept logits belong to whoever asked
for them.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from agentkv.core.batch import Batch, Sample, Sampled, Score, StepResult
from agentkv.model.attention import check_called_once, forward
from agentkv.model.attention_plan import AttentionPlanner
from agentkv.model.decode_graphs import DecodeGraphs
from agentkv.model.graph_reader import GraphReader, PlanGraphReader, WorkListReader
from agentkv.model.graph_sizes import Levels, capacity, levels
from agentkv.model.kv_cache import KVCache
from agentkv.model.logit_source import LogitSource
from agentkv.model.lora import AdapterStep
from agentkv.model.paged_step import AttentionOptions, PagedStep, PlanReader, Reader, nothing
from agentkv.model.step_graph import StepGraph, graph_maker
from agentkv.model.step_rows import StepRows
from agentkv.model.upload import upload
from agentkv_kernels.implementation import Implementation, choose

SLICE_BYTES = 32 << 20
"""Most bytes of logits converted and reduced at once; a sampler may hold a few such arrays."""
GPU_SLICE_BYTES = 256 << 20
"""The same on a GPU, where each slice waits for the device once."""


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
    num_graph_steps: int
    """Steps that ran as a CUDA graph."""


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
        batch_invariant: bool = False,
        fixed_rows: int | None = None,
        slice_bytes: int | None = None,
        adapters: AdapterStep | None = None,
    ) -> None:
        """Pairs a model with its pool.

        Args:
            model: The one that `kv.shape` was taken from.
            kv: The device pool.
            sampler: Chooses tokens from logits.
            implementation: Of the kernels: `reference` is the specification, and slow; None takes
                the one for the device.
            batch_invariant: Attention of a row does not depend on other rows, to the bit.
            fixed_rows: Pads every step to so many rows, so that matrix products have one shape
                whatever runs beside a row; no batch may have more. None: steps as they come.
            slice_bytes: Most bytes of fp32 logits that one call of the sampler sees; None takes
                the size for the device.
            adapters: Of the model; None where it has none.
        """
        self.kv = kv
        self._model = model
        self._sampler = sampler
        self._options = AttentionOptions(implementation, batch_invariant)
        self._fixed_rows = fixed_rows
        on_gpu = kv.shape.device.type == "cuda"
        self._slice_bytes = slice_bytes or (GPU_SLICE_BYTES if on_gpu else SLICE_BYTES)
        self._planner = AttentionPlanner(kv.block_size)
        self._step = PagedStep(kv, self._options)
        self._adapters = adapters or AdapterStep()
        self._graphs: DecodeGraphs | None = None
        self._num_steps = 0
        self._num_rows = 0

    def run(self, batch: Batch, meanwhile: Callable[[], None] = nothing) -> StepResult:
        """Computes one step.

        Args:
            batch: May have no rows, when all that is asked comes from kept heads.
            meanwhile: Called once: before layers that are one native call, or once all of the
                model is under way.

        Returns:
            Tokens, kept logits and log-probabilities in the order of the batch. A kept head is an
            fp32 tensor (vocab_size,) of its own memory on the model's device.

        Raises:
            UnsupportedModelError: The model did something at this step that load did not show.
        """
        with torch.inference_mode(), _current(self.kv.shape.device):
            self.kv.copy(batch.copies)
            source = self._forward(batch, meanwhile)
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
            num_graph_steps=self._graphs.num_replays if self._graphs is not None else 0,
        )

    def capture_graphs(
        self,
        max_rows: int,
        report: Callable[[str], None],
        *,
        sizes: tuple[int, ...] | None = None,
        make_graph: Callable[[], StepGraph] | None = None,
        make_levels: Levels = levels,
    ) -> None:
        """Makes graphs for steps that ask for the logits of each of their rows: those of decoding.

        Such steps then start with one call instead of hundreds. Others run as before.

        Args:
            max_rows: Rows of the largest step that there shall be a graph for.
            report: Called with a line of progress.
            sizes: Rows of the graphs, ascending; None chooses them for `max_rows`.
            make_graph: Makes an empty graph; None takes what the device has.
            make_levels: Says how many programs graphs start.

        Raises:
            RuntimeError: Something that the model does cannot be captured. The runner then works
                without graphs.
        """
        device = self.kv.shape.device
        with torch.inference_mode(), _current(device):
            graphs = DecodeGraphs(
                self._graph_reader(self._fixed_rows or max_rows, make_levels),
                make_graph or graph_maker(device),
                max_rows=max_rows,
                block_size=self.kv.block_size,
                device=device,
                sizes=(self._fixed_rows,) if self._fixed_rows else sizes,
            )
            graphs.capture(self._compute, report)
        self._graphs = graphs

    def _graph_reader(self, max_rows: int, make_levels: Levels) -> GraphReader:
        device = self.kv.shape.device
        if choose(self._options.implementation, self.kv.layer(0)[0]) != "triton":
            return PlanGraphReader(self._options)
        room = capacity(max_rows, make_levels(max_rows)[-1], self.kv.num_blocks)
        return WorkListReader(self._options, make_levels, room, device)

    def _forward(self, batch: Batch, meanwhile: Callable[[], None]) -> LogitSource:
        """Runs the model on a batch's rows; without any, there are only the heads it names."""
        asked = _asked_rows(batch)
        if not batch.num_rows:
            meanwhile()
            return LogitSource(None, (), self._slice_bytes)
        # A graph has no adapter: which rows have one is decided on the host.
        graphs = None if batch.adapters else self._graphs
        fits = graphs.padded_rows(batch, len(asked)) if graphs is not None else None
        num_rows = fits or self._fixed_rows or batch.num_rows
        self._adapters.begin(batch.adapters, num_rows)
        plan = self._planner.plan(batch, num_rows)
        logits = graphs.run(batch, plan) if fits and graphs is not None else None
        if logits is not None:
            meanwhile()
            return LogitSource(logits, asked, self._slice_bytes)
        device = self.kv.shape.device
        rows = StepRows.of(batch, num_rows, device)
        reader = PlanReader(self._options, plan)
        if self._fixed_rows is not None:  # the head is a matrix product as well
            every = range(batch.num_rows)
            logits = self._compute(rows, reader, meanwhile=meanwhile)
            return LogitSource(logits, every, self._slice_bytes)
        wanted = upload(asked, torch.int64, device)
        logits = self._compute(rows, reader, wanted, meanwhile)
        return LogitSource(logits, asked, self._slice_bytes)

    def _compute(
        self,
        rows: StepRows,
        reader: Reader,
        wanted: Tensor | None = None,
        meanwhile: Callable[[], None] = nothing,
    ) -> Tensor:
        """Runs the model; answers the wanted rows' logits, or every row's, (n, vocab_size)."""
        self._step.begin(rows, reader, meanwhile)
        if wanted is None:
            wanted = torch.arange(len(rows.slots), device=rows.slots.device)
        logits = forward(self._model, self._step, rows.token_ids, rows.positions, wanted)
        self._step.before_waiting()
        check_called_once(self._model, self._step.layers, self.kv.shape.num_layers)
        return logits

    def _sample(self, source: LogitSource, samples: Sequence[Sample]) -> Iterator[Sampled]:
        for part in source.slices(samples):
            yield from self._sampler.sample(source.gather(part), part)

    def _score(self, source: LogitSource, scores: Sequence[Score]) -> Iterator[float]:
        for part in source.slices(scores):
            tokens = [score.token for score in part]
            yield from self._sampler.token_logprobs(source.gather(part), tokens)


def _asked_rows(batch: Batch) -> list[int]:
    """Lists the rows whose logits anything of the batch needs, ascending."""
    rows = {sample.row for sample in batch.samples} | {score.row for score in batch.scores}
    return sorted(row for row in rows.union(batch.heads) if row is not None)


def _current(device: torch.device) -> AbstractContextManager[object]:
    """Makes a GPU the one that kernels go to; each thread has its own choice of it."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
