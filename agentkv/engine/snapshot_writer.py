"""One snapshot on its way to disk: files first, then the manifest by one rename.

It knows one snapshot's place and how much may be written there; which snapshots there are is
`snapshot_store`'s affair. Every call waits for the disk.
"""

import errno
import hashlib
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from agentkv.engine.snapshot_manifest import (
    FileEntry,
    Manifest,
    decode_manifest,
    encode_manifest,
)
from agentkv.errors import (
    AgentKVError,
    ContextLost,
    InternalError,
    InvalidRequest,
    NotFound,
    PoolExhausted,
    Reason,
)

DATA_FOLDER = re.compile(r"data-[0-9a-f]{32}")
"""What the folder of a snapshot's files is called."""
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class SnapshotWriter:
    """One snapshot on its way to disk; nothing of it can be seen before `commit`."""

    def __init__(
        self,
        path: Path,
        folder: Path,
        room: int,
        limit: int,
        *,
        overwrite: bool,
    ) -> None:
        """Begins to write.

        Args:
            path: Where the manifest is put at the end; its stem is the snapshot's name.
            folder: An empty folder for the files.
            room: Bytes that may be written.
            limit: Bytes that the tenant may keep in all.
            overwrite: Whether a snapshot of this name is replaced.
        """
        self.folder = folder.name
        self._path = path
        self._data = folder
        self._name = path.stem
        self._room = room
        self._limit = limit
        self._overwrite = overwrite
        self._is_visible = False

    def write(self, file_name: str, data: bytes) -> FileEntry:
        """Writes one file, to the disk itself.

        Raises:
            PoolExhausted: It exceeds what the tenant may keep, or the disk is full.
        """
        self._room -= len(data)
        if self._room < 0:
            raise too_much(len(data), self._room + len(data), self._limit)
        with telling(self._name):
            _write(self._data / file_name, data)
        return FileEntry(file_name, len(data), hashlib.sha256(data).hexdigest())

    def commit(self, manifest: Manifest) -> None:
        """Makes the snapshot visible, in place of the one it replaces; whole, or not at all.

        Raises:
            InvalidRequest: Another one of this name was saved meanwhile.
            PoolExhausted: The disk is full.
        """
        require_free(self._path, overwrite=self._overwrite)
        replaced = None
        with suppress(OSError, ContextLost, NotFound):
            replaced = decode_manifest(self._path.read_bytes(), self._name).folder
        hidden = self._data / "manifest"
        with telling(self._name):
            _write(hidden, encode_manifest(manifest))
            sync(self._data)
            if self._overwrite:
                hidden.replace(self._path)
            else:
                _place(hidden, self._path)
            self._is_visible = True
            sync(self._path.parent)
        if replaced is not None and DATA_FOLDER.fullmatch(replaced):
            shutil.rmtree(self._path.parent / replaced, ignore_errors=True)

    def abort(self) -> None:
        """Removes what was written, unless it was committed."""
        if not self._is_visible:
            shutil.rmtree(self._data, ignore_errors=True)


def require_free(path: Path, *, overwrite: bool) -> None:
    """Makes sure that a snapshot may have this manifest.

    Raises:
        InvalidRequest: There is one already, which is not to be replaced.
    """
    if path.exists() and not overwrite:
        raise _exists(path)


def too_much(need: int, room: int, limit: int) -> PoolExhausted:
    """Makes the refusal of `need` bytes where `room` of a tenant's `limit` are left."""
    return PoolExhausted(
        f"The snapshot takes {need} bytes, and {max(0, room)} of {limit} are "
        "left; delete some, or save without KV.",
        reason=Reason.TENANT_QUOTA,
        metadata={
            "quota": "snapshot_bytes",
            "limit": limit,
            "need": need,
            "free": max(0, room),
        },
    )


def sync(folder: Path) -> None:
    """Makes the names in a folder last."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def telling(name: str) -> Iterator[None]:
    """Turns what a disk says into an error of ours.

    Raises:
        PoolExhausted: The disk is full.
        InternalError: It failed otherwise.
    """
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise PoolExhausted(
                f"The server's disk has no room for the snapshot {name}; nothing of it was kept. "
                "Delete snapshots, or save without KV.",
                reason=Reason.DISK_FULL,
            ) from error
        raise InternalError(
            f"The server cannot write snapshots: {error.strerror}; nothing of {name} was kept."
        ) from error


def _place(hidden: Path, path: Path) -> None:
    """Moves a file to a name that nobody has; a link fails where a rename would replace.

    Raises:
        InvalidRequest: Somebody has it.
    """
    try:
        os.link(hidden, path)
    except FileExistsError:
        raise _exists(path) from None
    hidden.unlink()


def _write(path: Path, data: bytes) -> None:
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _exists(path: Path) -> AgentKVError:
    return InvalidRequest(
        f"A snapshot {path.stem} exists already; choose another name, or overwrite it.",
        reason=Reason.SNAPSHOT_EXISTS,
    )
