"""Runs a template for a bounded time and a bounded length, on any thread.

A loop in a template cannot be interrupted from outside: a template is compiled to Python, so each
of its lines is looked at from inside, by a trace function of this thread alone.
"""

import inspect
import sys
from collections.abc import Callable
from time import monotonic
from types import FrameType
from typing import Any, TypeVar

_T = TypeVar("_T")
_TEMPLATE_FILE = "<template>"
"""The name under which Jinja compiles a template that comes from no file."""


class RenderingTooLong(Exception):
    """A template took more time, or wrote more text, than it may."""


def run_bounded(
    render: Callable[[], _T],
    *,
    max_seconds: float,
    max_characters: int,
    clock: Callable[[], float] = monotonic,
) -> _T:
    """Runs a function that renders a template.

    What one line of a template does inside the interpreter is not interrupted: that grows with
    the length of its operands alone, and only the server's operator chooses templates.

    Args:
        render: The function; its own result counts nothing.
        max_seconds: Time it may take, by `clock`.
        max_characters: Text that the template may write.
        clock: Seconds from any beginning.

    Raises:
        RenderingTooLong: It took more.
    """
    deadline, written = clock() + max_seconds, 0

    def trace(frame: FrameType, event: str, value: Any) -> Any:
        nonlocal written
        if clock() > deadline:
            raise RenderingTooLong(f"takes longer than {max_seconds:g} s")
        if frame.f_code.co_filename != _TEMPLATE_FILE:
            return None  # looked at when it is called, and not line by line
        # A compiled template is a generator: what it yields is what it writes.
        is_writing = event == "return" and frame.f_code.co_flags & inspect.CO_GENERATOR
        if is_writing and isinstance(value, str):
            written += len(value)
            if written > max_characters:
                raise RenderingTooLong(f"writes more than {max_characters} characters")
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        return render()
    finally:
        sys.settrace(before)
