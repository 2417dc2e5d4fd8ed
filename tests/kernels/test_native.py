"""The native library, where there is one: found, and on torch's threads."""

import ctypes

import pytest
import torch

from agentkv_kernels import native


@pytest.mark.parametrize("level", native.available_levels())
@pytest.mark.parametrize("num_threads", [1, 2])
def test_kernels_run_on_torch_threads(level: str, num_threads: int) -> None:
    """Catches a second OpenMP runtime, which would ignore torch's setting and fight for cores."""
    count = native.native_at(level).function("count_threads", ctypes.c_void_p)
    found = torch.zeros(1, dtype=torch.int64)
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        count(found.data_ptr())
    finally:
        torch.set_num_threads(before)
    assert found.item() == num_threads


def test_the_switch_turns_kernels_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a switch that nobody reads."""
    monkeypatch.setenv(native.SWITCH, "0")
    assert native.load_native.__wrapped__() is None
