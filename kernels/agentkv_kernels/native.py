"""Finds the native kernels: C functions, compiled when the package is installed.

Owns the loading and the choice of the level that this processor runs. It knows no kernel: whoever
calls one says what it takes. Without a library, or with one that does not load, everything is
computed by torch, with the same result to rounding.
"""

import ctypes
import functools
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

LIBRARY = Path(__file__).with_name("_native") / "libagentkv_native.so"
SWITCH = "AGENTKV_NATIVE"
"""Environment variable: `0` goes without native kernels, the name of a level takes that one."""
_log = logging.getLogger(__name__)


class NativeLibrary:
    """A loaded library, and the level of its functions that is called."""

    def __init__(self, library: ctypes.CDLL, level: str) -> None:
        self._library = library
        self.level = level
        """One of `available_levels`."""

    def function(self, name: str, *arguments: Any) -> Callable[..., None]:
        """Finds a function that returns nothing.

        Args:
            name: Without prefix and level.
            arguments: Its ctypes, in order.
        """
        function = self._library[f"agentkv_{name}_{self.level}"]
        function.argtypes = list(arguments)
        function.restype = None
        return function


@functools.cache
def load_native() -> NativeLibrary | None:
    """Loads the library for this processor, or says in the log why there is none."""
    wish = os.environ.get(SWITCH, "")
    if wish == "0":
        return None
    levels = available_levels()
    if wish and wish not in levels:
        _log.warning("%s=%s: this processor and this installation have %s", SWITCH, wish, levels)
    level = wish if wish in levels else next(iter(levels), None)
    return None if level is None else native_at(level)


def native_at(level: str) -> NativeLibrary:
    """Loads the library for one of the `available_levels`."""
    return NativeLibrary(ctypes.CDLL(str(LIBRARY)), level)


def available_levels() -> list[str]:
    """Lists the levels that can be called here, best first; none without a library."""
    if not LIBRARY.is_file():
        _log.info("No native kernels: %s was not compiled", LIBRARY)
        return []
    try:
        library = ctypes.CDLL(str(LIBRARY))
    except OSError as error:
        _log.warning("No native kernels: %s", error)
        return []
    names = ctypes.create_string_buffer(64)
    library.agentkv_levels(names)
    return names.value.decode().split()
