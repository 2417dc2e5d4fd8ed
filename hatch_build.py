"""Compiles the native kernels while the wheel, or an editable install, is made.

Owns which files become one shared library, and for which processors. It knows no kernel. It imports
the standard library and hatchling alone, since it runs before anything is installed. Where there is
no compiler, or another kind of processor, the wheel is pure Python and torch computes everything.

`python hatch_build.py` compiles in place, after a change of a source.
"""

import os
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

FOLDER = Path(__file__).parent / "kernels/agentkv_kernels/_native"
LIBRARY = FOLDER / "libagentkv_native.so"
LEVELS = {
    "avx2": ("-march=x86-64-v3",),
    "avxvnni": ("-march=x86-64-v3", "-mavxvnni"),
    "avx512vnni": ("-march=x86-64-v4", "-mavx512vnni", "-mprefer-vector-width=512"),
}
"""Each file that exports by `EXPORT` is compiled for each; `level.c` says which of them to call."""
FLAGS = (
    *("-O3", "-std=gnu11", "-fPIC", "-pthread", "-fvisibility=hidden"),
    *("-fno-math-errno", "-fno-trapping-math"),
    *("-Wall", "-Wextra", "-Werror=implicit-function-declaration"),
)


class NativeKernels(BuildHookInterface[Any]):
    """Hatch's hook: adds the library to the wheel when it could be made."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compiles, and gives the wheel the tag of this platform; in place for an editable one."""
        if self.target_name != "wheel" or not compile_library():
            return
        if version != "editable":
            target = LIBRARY.relative_to(FOLDER.parent.parent)
            build_data["force_include"][str(LIBRARY)] = str(target)
            tag = sysconfig.get_platform().replace("-", "_").replace(".", "_")
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{tag}"


def compile_library() -> bool:
    """Makes the library anew; says on stderr why there is none when it cannot be made."""
    compiler = shlex.split(os.environ.get("CC") or "gcc")
    if platform.machine() not in ("x86_64", "AMD64") or sys.platform != "linux":
        return _without("they are written for Linux on x86-64")
    if shutil.which(compiler[0]) is None:
        return _without(f"there is no {compiler[0]}")
    with tempfile.TemporaryDirectory() as scratch:
        try:
            objects = [*_compile(compiler, Path(scratch))]
            fresh = LIBRARY.with_name(f".{LIBRARY.name}.{os.getpid()}")
            _run([*compiler, "-shared", "-pthread", "-o", str(fresh), *objects, "-lm"])
            fresh.replace(LIBRARY)  # whoever has the old one mapped keeps it
        except subprocess.CalledProcessError as error:
            return _without(f"the compiler failed:\n{error.stderr}")
    return True


def _compile(compiler: list[str], scratch: Path) -> list[str]:
    """Compiles every file for every level it is meant for; answers the objects."""
    objects, running = [], []
    for source in sorted(FOLDER.glob("*.c")):
        levelled = "EXPORT(" in source.read_text(encoding="utf-8")
        for level, flags in LEVELS.items() if levelled else [("all", ())]:
            made = str(scratch / f"{source.stem}.{level}.o")
            command = [*compiler, *FLAGS, *flags, f"-DLEVEL={level}", "-c", str(source), "-o", made]
            running.append((command, subprocess.Popen(command, stderr=subprocess.PIPE, text=True)))
            objects.append(made)
    for command, process in running:
        _, said = process.communicate()
        if process.returncode:
            raise subprocess.CalledProcessError(process.returncode, command, stderr=said)
    return objects


def _run(command: list[str]) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)


def _without(reason: str) -> bool:
    print(f"AgentKV goes without native kernels: {reason}", file=sys.stderr)  # noqa: T201  # the build's log
    return False


if __name__ == "__main__":
    sys.exit(0 if compile_library() else 1)
