"""What tests on the repository itself share: where it is, and which files it holds."""

import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def tracked_files(*folders: str) -> list[str]:
    """Lists the files that git holds or would take, below some folders or everywhere, sorted."""
    command = [
        "git",
        "ls-files",
        "-z",
        "--cached",
        "--others",
        "--exclude-standard",
        "--",
        *folders,
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=60)
    names = done.stdout.split("\0")
    return sorted(name for name in names if name and (ROOT / name).is_file())


def lines_of(name: str) -> list[str]:
    """Reads a text file of the repository."""
    return (ROOT / name).read_text(encoding="utf-8").splitlines()
