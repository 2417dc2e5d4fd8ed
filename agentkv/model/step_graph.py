"""The seam to CUDA graphs: work that is recorded once and done again on the same addresses.

A graph's work may read nothing of the host, so what changes between steps lies in static buffers,
its results too. Everything else about graphs (which there are, what they are given) works with any
StepGraph and is tested on a CPU.
"""

from collections.abc import Callable
from typing import Any, Protocol

import torch

WARM_UPS = 2
"""Runs before recording: they compile kernels and make what libraries allocate at first use."""


class StepGraph(Protocol):
    """One piece of work."""

    def capture(self, work: Callable[[], None]) -> None:
        """Records the work; it is done at least once."""
        ...

    def replay(self) -> None:
        """Does the work again, on what the static buffers hold now."""
        ...


class CudaGraph:
    """Records kernel launches, and starts all of them with one call."""

    def __init__(self, pool: Any) -> None:
        """Makes an empty graph.

        Args:
            pool: `torch.cuda.graph_pool_handle()`, whose type torch keeps to itself. Graphs that
                never run at once may share one: they then share the memory of what they compute
                on the way.
        """
        self._pool = pool
        self._graph = torch.cuda.CUDAGraph()

    def capture(self, work: Callable[[], None]) -> None:
        """Does the work outside of the graph first, then records it."""
        cuda: Any = torch.cuda  # its streams carry no types
        before, aside = cuda.current_stream(), cuda.Stream()
        aside.wait_stream(before)
        with torch.cuda.stream(aside):
            for _ in range(WARM_UPS):
                work()
        before.wait_stream(aside)
        # thread_local: what other threads do with the device meanwhile is no part of the record.
        with torch.cuda.graph(self._graph, pool=self._pool, capture_error_mode="thread_local"):
            work()

    def replay(self) -> None:
        """Starts the recorded kernels; nothing of the host is read."""
        self._graph.replay()


class Rerun:
    """Stands in where there are no graphs: does the work again, on the same static buffers."""

    def __init__(self) -> None:
        self._work: Callable[[], None] | None = None

    def capture(self, work: Callable[[], None]) -> None:
        """Does the work once and keeps it."""
        self._work = work
        work()

    def replay(self) -> None:
        """Does it again."""
        assert self._work is not None, "nothing was captured"
        self._work()


def graph_maker(device: torch.device) -> Callable[[], StepGraph]:
    """Returns what makes graphs for a device, all of them sharing memory."""
    if device.type != "cuda":
        return Rerun
    pool = torch.cuda.graph_pool_handle()
    return lambda: CudaGraph(pool)
