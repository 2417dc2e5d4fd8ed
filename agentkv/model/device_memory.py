"""How much memory a device has, has free, and a piece of work takes: the seam to torch.cuda.

It decides nothing. Sizing the pool works with any DeviceMemory and is tested without a GPU.
"""

import os
from collections.abc import Callable
from typing import Protocol

import torch


class DeviceMemory(Protocol):
    """Memory of one device, in bytes."""

    def total(self) -> int:
        """All there is."""
        ...

    def free(self) -> int:
        """What nobody holds now, other processes included."""
        ...

    def peak_of(self, work: Callable[[], object]) -> int:
        """Does some work; says how much it took at most, beyond what was held before it."""
        ...


class CudaMemory:
    """Asks the driver, and torch's allocator for peaks."""

    def __init__(self, device: torch.device) -> None:
        """Looks at one GPU."""
        self._device = device

    def total(self) -> int:
        """All memory of the GPU."""
        return int(torch.cuda.mem_get_info(self._device)[1])

    def free(self) -> int:
        """What the driver would still give, after torch has given back what it only keeps."""
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        return int(torch.cuda.mem_get_info(self._device)[0])

    def peak_of(self, work: Callable[[], object]) -> int:
        """Counts what torch took from the driver meanwhile, the gaps between tensors included.

        What libraries take at their first call is taken by a first run, and not counted: it stays,
        and is missing in `free` from then on.
        """
        work()
        self.free()
        before = torch.cuda.memory_reserved(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        work()
        torch.cuda.synchronize(self._device)
        return int(torch.cuda.max_memory_reserved(self._device)) - before


class HostMemory:
    """Asks the operating system."""

    def total(self) -> int:
        """All memory of this computer."""
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")

    def free(self) -> int:
        """Pages that hold nothing."""
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")

    def peak_of(self, work: Callable[[], object]) -> int:
        """Does nothing: on a computer, the pool takes a share of what is free instead."""
        return 0


def memory_of(device: torch.device) -> DeviceMemory:
    """Returns the memory of a device."""
    return CudaMemory(device) if device.type == "cuda" else HostMemory()
