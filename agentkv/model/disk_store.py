"""The disk tier: one checksummed file per block, in a folder of its own.

    <folder>/agentkv-<random>/lock        held by the process that owns the folder
    <folder>/agentkv-<random>/<block>.kv  magic, length, crc32 (little endian), then the row

A thread reads and writes; callers never wait for the disk. A file appears whole or not at all:
it is written under another name and renamed. Nothing is flushed to the medium, as no file outlives
its process; what a dead process left is removed at the next start. A file that is missing, torn or
of other content reads as None, and full disks are counted, not raised: KV can be recomputed.

A file per block, not per run: runs are cut and joined at blocks, and files would have to follow.
"""

import fcntl
import logging
import os
import shutil
import struct
import tempfile
import threading
import time
import zlib
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from agentkv.core.disk_statistics import DiskStatistics

MAGIC = b"AKVBLOCK"
HEADER = struct.Struct("<8sQI")
PREFIX = "agentkv-"
MOST_PENDING = 64
"""Rows in memory on their way to disk, and as many on their way back; more are refused."""
READ_TIMEOUT = 10.0
"""Seconds after which reading a block is given up: it is recomputed."""

_log = logging.getLogger(__name__)


class DiskStore:
    """Rows by block id; each id is one file at most, so the folder is bounded.

    Invariants: a row handed out is what was last written to its id; a write that has not ended is
    read from memory; what the thread does for an id that was written again meanwhile is ignored.
    """

    def __init__(
        self,
        folder: Path,
        *,
        read_timeout: float = READ_TIMEOUT,
        most_pending: int = MOST_PENDING,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Makes a folder for this process, and removes those of dead ones.

        Raises:
            OSError: The folder cannot be made or written.
        """
        folder.mkdir(parents=True, exist_ok=True)
        remove_left_over(folder)
        made = Path(tempfile.mkdtemp(prefix=".new-", dir=folder))
        self._lock_file = _lock(made)  # before others see it as a folder that nobody holds
        self._folder = made.rename(folder / f"{PREFIX}{made.name.removeprefix('.new-')}")
        self._read_timeout, self._most_pending, self._clock = read_timeout, most_pending, clock
        self._changed = threading.Condition()
        self._jobs: deque[tuple[int, int]] = deque()
        """(block id, version) in order; what to do follows from `_writing` and `_reading`."""
        self._versions: dict[int, int] = {}
        """Of each id that was ever written; a spoilt one gets a version without a file."""
        self._writing: dict[int, Tensor] = {}
        self._reading: dict[int, float] = {}
        """Deadlines, by the clock."""
        self._staged: OrderedDict[int, Tensor | None] = OrderedDict()
        """Rows read ahead; None: there is nothing to be had."""
        self._ended: list[int] = []
        self._counts = DiskStatistics()
        self._is_closed = False
        self._thread = threading.Thread(target=self._work, name="agentkv-disk", daemon=True)
        self._thread.start()

    # -- callers -----------------------------------------------------------------------------

    def write(self, block_id: int, row: Tensor) -> bool:
        """Takes a row to be written in the background; False when too many are on their way."""
        with self._changed:
            self._renew(block_id)
            if len(self._writing) >= self._most_pending:
                self._count(num_refused=1)
                return False
            self._writing[block_id] = row
            self._post(block_id)
        return True

    def spoil(self, block_id: int) -> None:
        """Notes that an id holds nothing."""
        with self._changed:
            self._renew(block_id)

    def fetch(self, block_id: int) -> None:
        """Begins to read a row ahead."""
        with self._changed:
            if block_id in self._writing:
                self._stage(block_id, self._writing[block_id])
            elif block_id not in self._staged and block_id not in self._reading:
                self._reading[block_id] = self._clock() + self._read_timeout
                self._post(block_id)
            elif block_id in self._staged:
                self._ended.append(block_id)

    def fetched(self, wait: float) -> Sequence[int]:
        """Answers the ids whose reading has ended, or was given up, since the last call.

        Args:
            wait: Seconds to wait at most while there is none.
        """
        with self._changed:
            if not self._ended and wait > 0:
                self._changed.wait(wait)
            now = self._clock()
            for block_id in [b for b, deadline in self._reading.items() if deadline <= now]:
                del self._reading[block_id]  # what the thread brings later is ignored
                self._count(num_timeouts=1)
                self._stage(block_id, None)
            ended, self._ended = self._ended, []
        return ended

    def take(self, block_id: int) -> Tensor | None:
        """Hands over a row that was read ahead; None when it is not what was written.

        What was read ahead and had to make room for others is read now.
        """
        with self._changed:
            if block_id in self._writing:
                return self._writing[block_id]
            if block_id in self._staged:
                return self._staged.pop(block_id)
        return self._read(block_id)

    def statistics(self) -> DiskStatistics:
        """Counts since start."""
        with self._changed:
            return self._counts

    def close(self) -> None:
        """Ends the thread and removes the files. Closing twice is fine."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._thread.join(self._read_timeout)
        self._lock_file.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    # -- with the lock held ------------------------------------------------------------------

    def _renew(self, block_id: int) -> None:
        self._versions[block_id] = self._versions.get(block_id, 0) + 1
        self._writing.pop(block_id, None)
        self._reading.pop(block_id, None)
        self._staged.pop(block_id, None)

    def _post(self, block_id: int) -> None:
        self._jobs.append((block_id, self._versions.get(block_id, 0)))
        self._changed.notify_all()

    def _stage(self, block_id: int, row: Tensor | None) -> None:
        self._staged[block_id] = row
        while len(self._staged) > self._most_pending:
            self._staged.popitem(last=False)
        self._ended.append(block_id)
        self._changed.notify_all()

    def _count(self, **added: int) -> None:
        changes = {name: getattr(self._counts, name) + count for name, count in added.items()}
        self._counts = replace(self._counts, **changes)

    # -- the thread --------------------------------------------------------------------------

    def _work(self) -> None:
        while True:
            with self._changed:
                while not self._jobs and not self._is_closed:
                    self._changed.wait()
                if self._is_closed:
                    return
                block_id, version = self._jobs.popleft()
                if version != self._versions.get(block_id, 0):
                    continue
                row, is_read = self._writing.get(block_id), block_id in self._reading
            if row is not None:
                self._write(block_id, version, row)
            elif is_read:
                self._read_ahead(block_id, version)

    def _write(self, block_id: int, version: int, row: Tensor) -> None:
        failure = ""
        try:
            self._write_file(block_id, row)
        except OSError as error:
            failure = os.strerror(error.errno) if error.errno else str(error)
            _log.warning("a block of KV could not be written to disk: %s", failure)
        with self._changed:
            if failure:
                self._count(num_failed_writes=1)
                self._counts = replace(self._counts, last_failure=failure)
            else:
                self._count(num_written=1)
            if version == self._versions[block_id]:
                del self._writing[block_id]

    def _write_file(self, block_id: int, row: Tensor) -> None:
        """Writes a file whole or not at all; one that was there before is gone either way.

        Raises:
            OSError: The disk is full, or worse.
        """
        path = self._path(block_id)
        path.unlink(missing_ok=True)
        body, new = row.numpy().data, path.with_suffix(".new")
        try:
            with new.open("wb") as file:
                file.write(HEADER.pack(MAGIC, body.nbytes, zlib.crc32(body)))
                file.write(body)
            new.replace(path)
        except OSError:
            new.unlink(missing_ok=True)
            raise

    def _read_ahead(self, block_id: int, version: int) -> None:
        row = self._read(block_id)
        with self._changed:
            if version == self._versions.get(block_id, 0) and block_id in self._reading:
                del self._reading[block_id]
                self._stage(block_id, row)

    def _read(self, block_id: int) -> Tensor | None:
        row = None
        with suppress(OSError):
            row = read_row(self._path(block_id))
        with self._changed:
            self._count(num_read=row is not None, num_bad_reads=row is None)
        return row

    def _path(self, block_id: int) -> Path:
        return self._folder / f"{block_id}.kv"


def read_row(path: Path) -> Tensor | None:
    """Reads a file back, (num_bytes,) uint8; None when it is torn or of other content.

    Raises:
        OSError: It is not there, or cannot be read.
    """
    data = bytearray(path.read_bytes())
    if len(data) < HEADER.size:
        return None
    magic, length, checksum = HEADER.unpack_from(data)
    body = memoryview(data)[HEADER.size :]
    if magic != MAGIC or length != len(body) or checksum != zlib.crc32(body):
        return None
    return torch.frombuffer(data, dtype=torch.uint8, offset=HEADER.size).clone()


def remove_left_over(folder: Path) -> int:
    """Removes the folders of processes that are gone; returns how many there were.

    Raises:
        OSError: The folder cannot be listed.
    """
    count = 0
    for old in folder.glob(f"{PREFIX}*"):
        try:
            lock = _lock(old)
        except OSError:  # its process lives, or somebody else removes it
            continue
        shutil.rmtree(old, ignore_errors=True)
        lock.close()
        count += 1
    return count


def _lock(folder: Path) -> BinaryIO:
    """Takes the lock of a folder, which ends with its process.

    Raises:
        OSError: Another process holds it.
    """
    file = (folder / "lock").open("wb")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        raise
    return file
