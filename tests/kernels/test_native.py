"""The native library, where there is one: found, and its pool of threads."""

import ctypes
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from agentkv_kernels import native
from agentkv_kernels.int8_weights import Int8Products, Int8Weights

LEVELS = native.available_levels()


def _run(
    level: str, count: int, grain: int, num_threads: int, *, rounds: int = 0, jobs: int = 1
) -> tuple[Tensor, Tensor]:
    """Runs jobs of `count` items; answers how often each was done, and who did it last."""
    times = torch.zeros(count, dtype=torch.int64)
    workers = torch.full((count,), -1, dtype=torch.int64)
    types = (ctypes.c_void_p, ctypes.c_void_p, *[ctypes.c_int64] * 5)
    probe: Callable[..., None] = native.native_at(level).function("probe_pool", *types)
    probe(times.data_ptr(), workers.data_ptr(), count, grain, rounds, jobs, num_threads)
    return times, workers


of_library = pytest.mark.parametrize("level", LEVELS[:1])
"""Once, where there is a library: the pool is the same for every level."""


@of_library
@pytest.mark.parametrize("num_threads", [1, 2, 3, 8, 1000])
@pytest.mark.parametrize(("count", "grain"), [(0, 1), (1, 1), (2, 1), (97, 5), (64, 0), (9, 100)])
def test_each_item_is_done_once(level: str, num_threads: int, count: int, grain: int) -> None:
    """Catches an item that is lost or done twice, and workers beyond those asked for."""
    times, workers = _run(level, count, grain, num_threads, rounds=200, jobs=200)
    assert times.tolist() == [200] * count
    assert all(0 <= worker < min(num_threads, 64) for worker in workers.tolist())


@of_library
def test_more_items_than_a_job_has_parts(level: str) -> None:
    """Catches a count of parts that runs into the generation."""
    times, _ = _run(level, 3_000_001, 1, 2)
    assert torch.equal(times, torch.ones_like(times))


@of_library
def test_callers_at_once_share_nothing(level: str) -> None:
    """Catches helpers of one caller that work on another's job, and callers that wait forever."""

    def call(seed: int) -> bool:
        times, _ = _run(level, 16 + seed, 1 + seed % 3, 1 + seed % 8, rounds=seed % 50, jobs=2000)
        return times.tolist() == [2000] * len(times)

    with ThreadPoolExecutor(6) as threads:
        assert all(threads.map(call, range(24)))


@of_library
def test_a_fork_has_helpers_of_its_own(level: str) -> None:
    """Catches a child that waits for threads which stayed in its parent."""
    _run(level, 64, 1, 3)
    child = os.fork()
    if child == 0:
        times, _ = _run(level, 64, 1, 3, rounds=100, jobs=50)
        os._exit(0 if times.tolist() == [50] * 64 else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert _run(level, 64, 1, 3)[0].tolist() == [1] * 64


@of_library
def test_a_fork_amid_jobs_works(level: str) -> None:
    """Catches a child for which the helpers stay taken by a thread that it does not have."""
    ended = threading.Event()

    def call() -> None:
        while not ended.is_set():
            _run(level, 64, 1, 3, rounds=100, jobs=20)

    busy = threading.Thread(target=call)
    busy.start()
    try:
        for _ in range(10):
            child = os.fork()
            if child == 0:
                times, _ = _run(level, 64, 1, 3, rounds=100, jobs=20)
                os._exit(0 if times.tolist() == [20] * 64 else 1)
            assert os.waitpid(child, 0)[1] == 0
    finally:
        ended.set()
        busy.join()


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("num_rows", [1, 16])
def test_threads_change_no_bit(level: str, num_rows: int) -> None:
    """Catches a product whose result depends on who computes which part."""
    generator = torch.Generator().manual_seed(3)
    library = native.native_at(level)
    weights = Int8Weights.pack(torch.randn((1000, 576), generator=generator), library)
    rows = torch.randn((num_rows, 576), generator=generator)
    found, before = [], torch.get_num_threads()
    try:
        for num_threads in [1, 2, 8] * 5:
            torch.set_num_threads(num_threads)
            found.append(Int8Products(library).linear(rows, weights))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(one, found[0]) for one in found)


def test_the_switch_turns_kernels_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a switch that nobody reads."""
    monkeypatch.setenv(native.SWITCH, "0")
    assert native.load_native.__wrapped__() is None
