"""Memory that native calls use one after the other."""

import torch


class Scratch:
    """Memory that calls use one after the other; one thread at a time."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def at_least(self, num_bytes: int) -> int:
        """Returns an address with so many bytes behind it, of any contents."""
        if self._memory.numel() < num_bytes:
            self._memory = torch.empty(num_bytes + num_bytes // 4, dtype=torch.uint8)
        return self._memory.data_ptr()
