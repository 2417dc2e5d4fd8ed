"""How long calls take on a device: recorded as one graph, replayed, and divided.

On a CPU, where a rehearsal runs, one call is timed once. It knows nothing of what is called.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

Call = Callable[[], object]


class OutOfTime(Exception):
    """What is left would not fit the time there is."""


class Clock:
    """The time a whole run may take."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    @property
    def left(self) -> float:
        """Seconds until the end; negative after it."""
        return self._end - time.monotonic()

    def need(self, seconds: float) -> None:
        """Raises OutOfTime unless so many seconds are left."""
        if self.left < seconds:
            raise OutOfTime(f"{seconds:.0f} s needed, {self.left:.0f} s left")


class Timer:
    """Measures calls that are alike, such as one for each of several sets of KV."""

    def __init__(self, device: torch.device, repeats: int) -> None:
        self.device = device
        self._repeats = repeats

    def microseconds(self, calls: Sequence[Call], repeats: int | None = None) -> list[float]:
        """Returns the time of one call, measured several times, in a graph where that works.

        The calls follow each other, so that each finds the cache as the others left it.
        """
        if self.device.type != "cuda":
            begin = time.perf_counter()
            calls[-1]()
            return [(time.perf_counter() - begin) * 1e6]
        replay = self._graph(calls) or (lambda: [call() for call in calls])
        times = []
        for _ in range(repeats or self._repeats):
            begin, end = _event(), _event()
            begin.record()
            replay()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) * 1e3 / len(calls))
        return times

    def _graph(self, calls: Sequence[Call]) -> Call | None:
        """Records the calls, after running each once; None where one cannot be recorded."""
        cuda: Any = torch.cuda  # its streams carry no types
        aside = cuda.Stream()
        aside.wait_stream(cuda.current_stream())
        with cuda.stream(aside):
            for _ in range(2):
                for call in calls:
                    call()
        cuda.current_stream().wait_stream(aside)
        graph = cuda.CUDAGraph()
        try:
            with cuda.graph(graph):
                for call in calls:
                    call()
        except RuntimeError as error:
            print(f"not captured, measured without a graph: {error}")
            torch.cuda.synchronize()
            return None
        replay: Call = graph.replay
        replay()
        torch.cuda.synchronize()
        return replay


def _event() -> Any:
    cuda: Any = torch.cuda
    return cuda.Event(enable_timing=True)


class Ceilings:
    """What the device can do at most, measured: GB/s and TFLOP/s."""

    def __init__(self, timer: Timer, *, tiny: bool) -> None:
        size = 1 << 20 if tiny else 1 << 32
        source = torch.ones(size // 4, device=timer.device)
        reads = timer.microseconds([source.sum], 10)
        self.read = [size / time_us / 1e3 for time_us in reads]
        """Reading alone: a sum over 4 GB."""
        target = torch.empty_like(source)
        copies = timer.microseconds([lambda: target.copy_(source)], 10)
        self.copy = [2 * size / time_us / 1e3 for time_us in copies]
        """Reading and writing."""
        near = source[: (1 << 14 if tiny else 6 << 20)]  # 24 MB: fits the cache
        times = timer.microseconds([near.sum] * 8, 10)
        self.cached = [near.numel() * 4 / time_us / 1e3 for time_us in times]
        """Reading what the cache holds."""
        side = 64 if tiny else 8192
        matrix = torch.ones((side, side), dtype=torch.bfloat16, device=timer.device)
        times = timer.microseconds([lambda: matrix @ matrix], 10)
        self.product = [2 * side**3 / time_us / 1e6 for time_us in times]
        """Multiplying bfloat16 matrices."""
