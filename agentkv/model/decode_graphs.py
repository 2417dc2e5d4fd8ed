"""Graphs for the steps of decoding: which there are, and what a step must be to use one.

    key      padded rows, and the level of its work list
    capture  once, at start, the largest first so that the others fit into its memory
    replay   rows and work lists are refreshed in place, then the graph of the key runs
    logits   one buffer for all graphs, which the next replay overwrites

A step that fits no graph runs without: that is slower and otherwise the same. It knows neither
requests nor sampling.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from agentkv.core.batch import Batch
from agentkv.model.graph_reader import GraphReader
from agentkv.model.graph_sizes import row_sizes
from agentkv.model.paged_step import Reader
from agentkv.model.step_graph import StepGraph
from agentkv.model.step_rows import StaticRows, StepRows
from agentkv_kernels import AttentionPlan

Compute = Callable[[StepRows, Reader], Tensor]
"""Runs the model on rows: the logits of each, (num_rows, vocab_size)."""


class _Key(NamedTuple):
    num_rows: int
    level: int


class DecodeGraphs:
    """Runs steps that ask for the logits of every row, and of which there are few enough.

    Invariant: whatever graph runs, rows beyond the batch's are written nowhere and read nothing.
    """

    def __init__(
        self,
        reader: GraphReader,
        make_graph: Callable[[], StepGraph],
        *,
        max_rows: int,
        block_size: int,
        device: torch.device,
        sizes: tuple[int, ...] | None = None,
    ) -> None:
        """Prepares buffers; `capture` makes the graphs.

        Args:
            reader: How layers read.
            make_graph: Makes an empty graph.
            max_rows: Rows of the largest step that there shall be a graph for.
            block_size: Of the pool.
            device: Where the model is.
            sizes: Rows of the graphs, ascending; None chooses them for `max_rows`.
        """
        self.sizes = sizes or row_sizes(max_rows)
        """Rows of the graphs, ascending."""
        self.num_replays = 0
        """Steps that ran as a graph."""
        self._reader = reader
        self._make_graph = make_graph
        self._block_size = block_size
        self._rows = StaticRows(self.sizes[-1], device)
        self._graphs: dict[_Key, StepGraph] = {}
        self._logits: Tensor | None = None

    def capture(self, compute: Compute, report: Callable[[str], None]) -> None:
        """Makes all graphs.

        Args:
            compute: Runs the model; called at least once for each graph.
            report: Called with a line of progress.
        """
        keys = [
            _Key(size, level)
            for size in reversed(self.sizes)
            for level in reversed(range(len(self._reader.levels(size))))
        ]
        for number, key in enumerate(keys, 1):
            report(f"Capturing CUDA graphs: {number} of {len(keys)}, {key.num_rows} rows")
            nothing = AttentionPlan.build([], [0] * key.num_rows, block_size=self._block_size)
            self._reader.load(nothing)
            if self._logits is None:  # the largest: its result shows the width and the dtype
                self._logits = torch.empty_like(self._all_logits(compute, key))
            graph = self._make_graph()
            graph.capture(partial(self._fill, compute, key))
            self._graphs[key] = graph

    def _fill(self, compute: Compute, key: _Key) -> None:
        """Computes what the static rows say into the static logits: the work of every graph."""
        assert self._logits is not None
        self._logits[: key.num_rows].copy_(self._all_logits(compute, key))

    def _all_logits(self, compute: Compute, key: _Key) -> Tensor:
        self._reader.aim(self._reader.levels(key.num_rows)[key.level])
        return compute(self._rows.first(key.num_rows), self._reader)

    def padded_rows(self, batch: Batch, num_asked: int) -> int | None:
        """Says how many rows a batch's plan must have, or None: no graph fits it.

        Args:
            batch: A step.
            num_asked: Rows whose logits it needs. A chunk needs few of its rows' logits, and takes
                long enough without a graph.
        """
        if num_asked < batch.num_rows:
            return None
        return next((size for size in self.sizes if size >= batch.num_rows), None)

    def run(self, batch: Batch, plan: AttentionPlan) -> Tensor | None:
        """Computes a step.

        Args:
            batch: One that `padded_rows` has accepted.
            plan: Of the batch, padded.

        Returns:
            The logits of the batch's rows, (num_rows, vocab_size), which the next step may
            overwrite; None if no graph can run a plan like this one.
        """
        level = self._reader.load(plan)
        if level is None:
            return None
        self._rows.load(batch, plan.num_rows)
        self._graphs[_Key(plan.num_rows, level)].replay()
        self.num_replays += 1
        assert self._logits is not None
        return self._logits[: batch.num_rows]
