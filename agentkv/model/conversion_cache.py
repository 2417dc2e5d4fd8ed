"""Folders made once from a source file and found again at every later start.

It knows paths, sizes and checksums, not what is converted. A folder is addressed by the content
of its source, so that a changed source is another folder and a moved one is the same:

    <root>/<name>-<first 16 hex digits of the source's SHA-256>-v<format>/
        manifest.json      sizes and SHA-256 of the source and of every file beside it
        ...                what the conversion wrote

A folder appears by one rename after everything in it is on disk; a lock file lets two processes
that start together convert once.
"""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import platformdirs
from filelock import FileLock

MANIFEST = "manifest.json"
FULL_CHECK_BYTES = 32 * 2**20
"""Files up to this size are hashed at every start; of larger ones the size is checked."""


@dataclass(frozen=True, slots=True)
class CacheKey:
    """Names one conversion: what is converted, and by which version of the converter."""

    name: str
    """Readable part of the folder's name."""
    source_sha256: str
    """Hexadecimal digest of the whole source file."""
    format: int
    """Raised whenever the same source would be converted differently."""

    @property
    def folder_name(self) -> str:
        """Name of the folder below the cache's root."""
        return f"{self.name}-{self.source_sha256[:16]}-v{self.format}"


def default_root() -> Path:
    """Folder of converted models in the user's cache, `XDG_CACHE_HOME` honoured."""
    return Path(platformdirs.user_cache_dir("agentkv")) / "models"


def file_sha256(path: Path) -> str:
    """Hexadecimal SHA-256 of a file; about 0.15 s per 100 MB, far below reading it as a model."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def find(root: Path, key: CacheKey) -> Path | None:
    """Finds an intact folder; None when there is none, or when something in it is torn."""
    folder = root / key.folder_name
    return folder if _is_intact(folder, key) else None


def find_or_build(root: Path, key: CacheKey, build: Callable[[Path], None]) -> Path:
    """Finds the folder of a conversion, or makes it.

    Args:
        root: Folder that holds all conversions; created when missing.
        key: The conversion wanted.
        build: Writes the files into the empty folder it is given. Called at most once, and not
            at all when an intact folder is there or another process has just made it.

    Returns:
        The folder, complete and checked.

    Raises:
        OSError: The disk is full or the root cannot be written; nothing is left half done.
    """
    if (folder := find(root, key)) is not None:
        return folder
    root.mkdir(parents=True, exist_ok=True)
    with FileLock(root / f"{key.folder_name}.lock"):
        if (folder := find(root, key)) is not None:
            return folder
        folder = root / key.folder_name
        with tempfile.TemporaryDirectory(prefix=f".{key.name}-", dir=root) as scratch:
            fresh = Path(scratch) / "fresh"
            fresh.mkdir()
            build(fresh)
            _write_manifest(fresh, key)
            if folder.exists():  # torn, or `find` would have returned it
                folder.rename(Path(scratch) / "torn")
            fresh.rename(folder)
        _sync(root)
    return folder


def size_bytes(folder: Path) -> int:
    """Sums the sizes of the files in a folder and below it."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def remove(folder: Path) -> None:
    """Deletes a converted folder; the next start converts again."""
    shutil.rmtree(folder, ignore_errors=True)


def _write_manifest(folder: Path, key: CacheKey) -> None:
    files = {}
    for path in _files(folder):
        files[path.name] = {"size": path.stat().st_size, "sha256": file_sha256(path)}
        _sync(path)
    manifest = {"format": key.format, "source_sha256": key.source_sha256, "files": files}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
    _sync(folder / MANIFEST)
    _sync(folder)


def _is_intact(folder: Path, key: CacheKey) -> bool:
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        expected = manifest["files"]
        return (
            manifest["source_sha256"] == key.source_sha256
            and {path.name for path in _files(folder)} == set(expected)
            and all(_is_whole(folder / name, facts) for name, facts in expected.items())
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False  # whatever is wrong with it, converting again is the answer


def _is_whole(path: Path, facts: dict[str, object]) -> bool:
    size = path.stat().st_size
    if size != facts["size"]:
        return False
    return size > FULL_CHECK_BYTES or file_sha256(path) == facts["sha256"]


def _files(folder: Path) -> Iterator[Path]:
    return (path for path in sorted(folder.iterdir()) if path.name != MANIFEST)


def _sync(path: Path) -> None:
    """Waits until a file or a folder's list of names is on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
