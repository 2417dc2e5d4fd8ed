"""The host tier: blocks that left the device pool, in memory of this computer.

    CompactStore  beside a pool in the same memory: rows, exact or 8-bit, each with a checksum
    PinnedStore   beside a GPU's pool: rows in pinned memory, carried on a stream of their own

Both know rows and block ids; whose KV it is, and when it moves, is decided elsewhere.
"""

import zlib
from typing import Any, Protocol

import torch
from torch import Tensor

from agentkv.model.block_format import BlockFormat
from agentkv.model.kv_cache import KVCache


class HostStore(Protocol):
    """Rows of the host tier, by block id."""

    @property
    def num_bytes(self) -> int:
        """Bytes of one row."""
        ...

    def save(self, src_block_id: int, host_block_id: int) -> None:
        """Keeps a block of the device pool."""
        ...

    def load(self, host_block_id: int, dst_block_id: int) -> bool:
        """Puts a kept block into the device pool; False when it is not what was saved."""
        ...

    def read(self, host_block_id: int) -> Tensor | None:
        """Copies a kept row, (num_bytes,) uint8; None when it is not what was saved."""
        ...

    def put(self, row: Tensor, dst_block_id: int) -> None:
        """Puts a row that was read earlier into the device pool."""
        ...

    def spoil(self, host_block_id: int) -> None:
        """Notes that a row holds nothing."""
        ...

    def join(self) -> None:
        """Lets what the device does next come after the moves so far."""
        ...


class CompactStore:
    """The host tier of a pool that is in host memory itself.

    A row is checked against the checksum (zlib's crc32) of when it was saved before it is used:
    a bit that fell over costs a recomputation, not another conversation's words.
    """

    def __init__(self, kv: KVCache, num_blocks: int, *, rounds: bool = False) -> None:
        """Makes room for `num_blocks` rows; memory is taken as they are written."""
        self._format = BlockFormat(kv, rounds=rounds)
        self._rows = torch.empty((num_blocks, self._format.num_bytes), dtype=torch.uint8)
        self._checksums: dict[int, int] = {}

    @property
    def num_bytes(self) -> int:
        """Bytes of one row."""
        return self._format.num_bytes

    def save(self, src_block_id: int, host_block_id: int) -> None:
        """Keeps a block of the device pool."""
        row = self._rows[host_block_id]
        self._format.pack(src_block_id, row)
        self._checksums[host_block_id] = _checksum(row)

    def load(self, host_block_id: int, dst_block_id: int) -> bool:
        """Puts a kept block into the device pool; False when it is not what was saved."""
        if not self._is_whole(host_block_id):
            return False
        self._format.unpack(self._rows[host_block_id], dst_block_id)
        return True

    def read(self, host_block_id: int) -> Tensor | None:
        """Copies a kept row, (num_bytes,) uint8; None when it is not what was saved."""
        return self._rows[host_block_id].clone() if self._is_whole(host_block_id) else None

    def put(self, row: Tensor, dst_block_id: int) -> None:
        """Puts a row that was read earlier into the device pool."""
        self._format.unpack(row, dst_block_id)

    def spoil(self, host_block_id: int) -> None:
        """Notes that a row holds nothing."""
        self._checksums.pop(host_block_id, None)

    def join(self) -> None:
        """Does nothing: a move has ended when it returns."""

    def _is_whole(self, host_block_id: int) -> bool:
        checksum = self._checksums.get(host_block_id)
        return checksum is not None and checksum == _checksum(self._rows[host_block_id])


class PinnedStore:
    """The host tier of a GPU's pool.

    Copies run on a stream of their own, in the order of the moves. The stream first waits for what
    the device was given before (the step that wrote the KV), and `join` lets the next step wait
    for the copies; the host waits for neither, unless a row goes on to disk. Rows carry no
    checksum: computing it would take the host longer than the copy, and pinned memory is not
    written by anything else.
    """

    def __init__(self, kv: KVCache, num_blocks: int) -> None:
        """Pins memory for `num_blocks` rows."""
        self._format = BlockFormat(kv)
        self._device = kv.shape.device
        self._rows = torch.empty(
            (num_blocks, self._format.num_bytes), dtype=torch.uint8, pin_memory=True
        )
        self._holds: set[int] = set()
        self._stream = _new_stream(self._device)

    @property
    def num_bytes(self) -> int:
        """Bytes of one row."""
        return self._format.num_bytes

    def save(self, src_block_id: int, host_block_id: int) -> None:
        """Begins to keep a block of the device pool."""
        with self._ordered():
            staged = self._staging()
            self._format.pack(src_block_id, staged)
            self._rows[host_block_id].copy_(staged, non_blocking=True)
        self._holds.add(host_block_id)

    def load(self, host_block_id: int, dst_block_id: int) -> bool:
        """Begins to put a kept block into the device pool; False when there is none."""
        if host_block_id not in self._holds:
            return False
        self.put(self._rows[host_block_id], dst_block_id)
        return True

    def read(self, host_block_id: int) -> Tensor | None:
        """Waits for the copies so far, and copies a kept row; None when there is none."""
        if host_block_id not in self._holds:
            return None
        self._stream.synchronize()
        return self._rows[host_block_id].clone()

    def put(self, row: Tensor, dst_block_id: int) -> None:
        """Begins to put a row into the device pool."""
        with self._ordered():
            staged = self._staging()
            staged.copy_(row, non_blocking=True)
            self._format.unpack(staged, dst_block_id)

    def spoil(self, host_block_id: int) -> None:
        """Notes that a row holds nothing."""
        self._holds.discard(host_block_id)

    def join(self) -> None:
        """Lets what the device does next come after the copies so far."""
        torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def _ordered(self) -> torch.cuda.StreamContext:
        """Makes this store's stream the current one, after all that was queued before."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        return torch.cuda.stream(self._stream)

    def _staging(self) -> Tensor:
        """Takes device memory for one row; torch's allocator reuses it in the stream's order."""
        return torch.empty(self._format.num_bytes, dtype=torch.uint8, device=self._device)


def make_host_store(kv: KVCache, num_blocks: int, *, rounds: bool) -> HostStore:
    """Makes the store that fits where the pool is."""
    if kv.shape.device.type == "cuda":
        return PinnedStore(kv, num_blocks)
    return CompactStore(kv, num_blocks, rounds=rounds)


def _checksum(row: Tensor) -> int:
    return zlib.crc32(row.numpy().data)


def _new_stream(device: torch.device) -> torch.cuda.Stream:
    untyped: Any = torch.cuda.Stream  # torch does not type its constructor
    stream = untyped(device)
    assert isinstance(stream, torch.cuda.Stream)
    return stream
