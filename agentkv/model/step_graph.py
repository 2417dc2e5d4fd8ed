"""The seam to CUDA graphs: work that is recorded once and done again on the same addresses.

A graph's work may read nothing of the host, so what changes between steps lies in static buffers.
Everything else about graphs (which there are, what they are given) works with any StepGraph and is
tested on a CPU.
"""

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

WARM_UPS = 2
"""Runs before recording: they compile kernels and make what libraries allocate at first use."""


class StepGraph(Protocol):
    """One piece of work with one result."""

    def capture(self, compute: Callable[[], Tensor]) -> None:
        """Records the work; it is done at least once."""
        ...

    def replay(self) -> Tensor:
        """Does the work again, on what the static buffers hold now.

        Returns:
            The result; the next replay of any graph may overwrite it.
        """
        ...


class CudaGraph:
    """Records kernel launches, and starts all of them with one call."""

    def __init__(self, pool: Any) -> None:
        """Makes an empty graph.

        Args:
            pool: `torch.cuda.graph_pool_handle()`, whose type torch keeps to itself; shared by
                graphs that never run at once: they then share the memory of their intermediate results.
        """
        self._pool = pool
        self._graph = torch.cuda.CUDAGraph()
        self._result: Tensor | None = None

    def capture(self, compute: Callable[[], Tensor]) -> None:
        """Runs the work outside of the graph first, then records it."""
        cuda: Any = torch.cuda  # its streams carry no types
        before, aside = cuda.current_stream(), cuda.Stream()
        aside.wait_stream(before)
        with torch.cuda.stream(aside):
            for _ in range(WARM_UPS):
                compute()
        before.wait_stream(aside)
        # thread_local: what other threads do with the device meanwhile is not part of the record.
        with torch.cuda.graph(self._graph, pool=self._pool, capture_error_mode="thread_local"):
            self._result = compute()

    def replay(self) -> Tensor:
        """Starts the recorded kernels; they read the host at no point."""
        assert self._result is not None, "nothing was captured"
        self._graph.replay()
        return self._result


class Rerun:
    """Stands in where there are no graphs: does the work again, on the same static buffers.

    Like a graph's, its result is always the same tensor.
    """

    def __init__(self) -> None:
        self._compute: Callable[[], Tensor] | None = None
        self._result: Tensor | None = None

    def capture(self, compute: Callable[[], Tensor]) -> None:
        """Does the work once and keeps it."""
        self._compute = compute
        self._result = compute()

    def replay(self) -> Tensor:
        """Does it again."""
        assert self._compute is not None, "nothing was captured"
        assert self._result is not None
        self._result.copy_(self._compute())
        return self._result


def graph_maker(device: torch.device) -> Callable[[], StepGraph]:
    """Returns what makes graphs for a device, all of them sharing memory."""
    if device.type != "cuda":
        return Rerun
    pool = torch.cuda.graph_pool_handle()
    return lambda: CudaGraph(pool)
