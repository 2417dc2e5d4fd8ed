"""Runs what tests the CPU implementation once for each form of it that this machine has."""

import pytest

from agentkv_kernels import cpu_native, native

LEVELS = native.available_levels()
# What attention does not use is all that levels between the best and the last differ in.
FORMS = ["torch", *dict.fromkeys([*LEVELS[:1], *LEVELS[-1:]])]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Says why native kernels were not tested, where there are none."""
    if not LEVELS:
        path = native.LIBRARY
        reason = "does not load or run here" if path.is_file() else "was not compiled"
        terminalreporter.write_line(f"Native kernels were not tested: {path.name} {reason}")


@pytest.fixture(params=FORMS)
def cpu_kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Makes "cpu" mean torch alone, or the native kernels of one level; answers which."""
    level: str = request.param
    library = None if level == "torch" else native.native_at(level)
    monkeypatch.setattr(cpu_native, "find_library", lambda: library)
    return level
