"""Runs what tests the CPU implementation once for each form of it that this machine has."""

from typing import Any

import pytest

from agentkv_kernels import cpu_native, native

LEVELS: list[Any] = [*native.available_levels()]
ABSENT = pytest.param(
    "native", marks=pytest.mark.skip(f"no native kernels: {native.LIBRARY.name} was not compiled")
)
# What attention does not use is all that levels between the best and the last differ in.
FORMS = ["torch", *([LEVELS[0], LEVELS[-1]] if len(LEVELS) > 1 else LEVELS or [ABSENT])]


@pytest.fixture(params=FORMS)
def cpu_kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Makes "cpu" mean torch alone, or the native kernels of one level; answers which."""
    level: str = request.param
    library = None if level == "torch" else native.native_at(level)
    monkeypatch.setattr(cpu_native, "find_library", lambda: library)
    return level
