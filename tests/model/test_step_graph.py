"""The CUDA side of the seam, with torch's own calls faked: in which order they come."""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from agentkv.model.step_graph import WARM_UPS, CudaGraph, Rerun, graph_maker


class FakeStream:
    def __init__(self, log: list[str], name: str) -> None:
        self._log, self.name = log, name

    def wait_stream(self, other: "FakeStream") -> None:
        self._log.append(f"{self.name} waits for {other.name}")


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What happened, in order, on a GPU that is not there."""
    events: list[str] = []

    class Graph:
        def replay(self) -> None:
            events.append("replay")

    @contextmanager
    def stream(_: FakeStream) -> Iterator[None]:
        events.append("aside:")
        yield

    @contextmanager
    def graph(_: Graph, *, pool: object, capture_error_mode: str) -> Iterator[None]:
        events.append(f"record into {pool}, {capture_error_mode}:")
        yield
        events.append("recorded")

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "Stream", lambda: FakeStream(events, "aside"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: FakeStream(events, "main"))
    monkeypatch.setattr(torch.cuda, "stream", stream)
    monkeypatch.setattr(torch.cuda, "graph", graph)
    return events


def test_work_is_recorded_after_it_ran_aside(log: list[str]) -> None:
    """Catches a recording of what libraries do at their first call, or one that runs too early."""
    graph = CudaGraph("pool")
    graph.capture(lambda: log.append("work"))
    graph.replay()
    assert log == [
        "aside waits for main",
        "aside:",
        *["work"] * WARM_UPS,
        "main waits for aside",
        "record into pool, thread_local:",
        "work",
        "recorded",
        "replay",
    ]


def test_torch_takes_what_the_recording_is_given() -> None:
    """Catches an argument that torch names otherwise: no test without a GPU would reach it."""
    parameters = inspect.signature(torch.cuda.graph.__init__).parameters
    assert {"pool", "capture_error_mode"} <= set(parameters)
    assert callable(torch.cuda.graph_pool_handle)


def test_a_cpu_does_the_work_again() -> None:
    """Catches a stand-in that does not do the work at a replay."""
    done: list[int] = []
    graph = graph_maker(torch.device("cpu"))()
    assert isinstance(graph, Rerun)
    graph.capture(lambda: done.append(1))
    graph.replay()
    assert done == [1, 1]
