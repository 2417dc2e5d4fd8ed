"""Parts of a batch's rows whose temporary copies are of a good size for the device."""

from collections.abc import Iterator, Sequence

from torch import Tensor

CPU_ELEMENTS_AT_ONCE = 2**18
"""Elements of a part: 2 MiB for each float64 copy, which stays in the cache, and whose memory is
not handed back to the system and asked for again."""
GPU_ELEMENTS_AT_ONCE = 2**24
"""The same on a GPU, where a few large launches are better: 128 MiB for each copy."""


def row_chunks(rows: Sequence[int], logits: Tensor) -> Iterator[list[int]]:
    """Splits a list of rows of (n, vocab_size) logits."""
    on_cpu = logits.device.type == "cpu"
    limit = CPU_ELEMENTS_AT_ONCE if on_cpu else GPU_ELEMENTS_AT_ONCE
    size = max(1, limit // logits.shape[1])
    for start in range(0, len(rows), size):
        yield list(rows[start : start + size])
