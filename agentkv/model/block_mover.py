"""Carries KV between tiers, as core's moves say, and notes which moves failed.

It decides nothing: what moves, where and in which order is in the moves.
"""

import logging
from collections.abc import Sequence

import torch

from agentkv.core.block_move import BlockMove, Place, Tier
from agentkv.core.disk_statistics import DiskStatistics
from agentkv.model.disk_store import DiskStore
from agentkv.model.host_store import HostStore

_log = logging.getLogger(__name__)


class BlockMover:
    """One host store, and perhaps one disk store below it.

    Invariant: a move either puts exactly what was saved where it should be, or is reported as
    failed; what a failed move leaves behind is never read by a later one.
    """

    def __init__(self, host: HostStore, disk: DiskStore | None = None) -> None:
        self._host = host
        self._disk = disk

    def move(self, moves: Sequence[BlockMove]) -> Sequence[BlockMove]:
        """Does the moves in order; the device's next work comes after them.

        Returns:
            The moves that failed.
        """
        failed = []
        with torch.inference_mode():
            for move in moves:
                try:
                    is_done = self._move(move)
                except Exception:  # a fault of memory or device: the KV is recomputed
                    _log.exception("%s failed", move)
                    is_done = False
                if not is_done:
                    failed.append(move)
                    self._spoil(move.dst)
            self._host.join()
        return failed

    def fetch(self, places: Sequence[Place]) -> None:
        """Begins to read disk blocks ahead, in the background."""
        assert self._disk is not None
        for place in places:
            self._disk.fetch(place.block_id)

    def fetched(self, wait: float) -> Sequence[Place]:
        """Answers whose reading has ended, well or not, waiting up to `wait` seconds for one."""
        if self._disk is None:
            return ()
        return [Place(Tier.DISK, block_id) for block_id in self._disk.fetched(wait)]

    def disk_statistics(self) -> DiskStatistics | None:
        """Counts what the disk tier has done; None when there is none."""
        return self._disk.statistics() if self._disk is not None else None

    def close(self) -> None:
        """Ends the background thread and removes the files."""
        if self._disk is not None:
            self._disk.close()

    def _move(self, move: BlockMove) -> bool:
        src, dst = move
        match src.tier, dst.tier:
            case Tier.DEVICE, Tier.HOST:
                self._host.save(src.block_id, dst.block_id)
                return True
            case Tier.HOST, Tier.DEVICE:
                return self._host.load(src.block_id, dst.block_id)
            case Tier.HOST, Tier.DISK:
                assert self._disk is not None
                row = self._host.read(src.block_id)
                return row is not None and self._disk.write(dst.block_id, row)
            case Tier.DISK, Tier.DEVICE:
                assert self._disk is not None
                row = self._disk.take(src.block_id)
                if row is not None:
                    self._host.put(row, dst.block_id)
                return row is not None
        raise AssertionError(f"{move} skips a tier")

    def _spoil(self, place: Place) -> None:
        if place.tier is Tier.HOST:
            self._host.spoil(place.block_id)
        elif place.tier is Tier.DISK and self._disk is not None:
            self._disk.spoil(place.block_id)
