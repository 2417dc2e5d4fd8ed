"""How large the steps are that graphs exist for: padded rows, and how many programs each starts.

A graph starts a fixed number of programs, and those without work leave at once; so one graph serves
every work list that needs no more. Host numbers only.
"""

from collections.abc import Callable, Iterable, Sequence

from agentkv_kernels import Capacity
from agentkv_kernels.work_buffers import Buckets, bucket

Levels = Callable[[int], tuple[Buckets, ...]]
"""From the rows of a graph to the programs it starts, one set for each of its levels, ascending."""

ROW_SIZES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
"""Rows of graphs: padding costs a third of a step's rows at most, beyond a few."""
MAX_BLOCK_IDS = 1 << 22
"""Block ids of one work list that there is room for (16 MiB); longer ones run without a graph."""


def row_sizes(max_rows: int) -> tuple[int, ...]:
    """Lists the rows of graphs for steps of up to `max_rows`; the last one is as large as any.

    Above the largest of ROW_SIZES steps run without a graph: their kernels are long enough to hide
    the launches.
    """
    largest = min(max_rows, ROW_SIZES[-1])
    return (*(size for size in ROW_SIZES if size < largest), largest)


def levels(num_rows: int) -> tuple[Buckets, ...]:
    """Lists the programs that graphs of so many rows start, ascending.

    The first is for branches that share a prefix or nothing, the second for deep trees. Programs
    without work cost about a nanosecond each. What needs more runs without a graph.
    """
    merge = bucket(num_rows)
    small, large = bucket(2 * num_rows + 64), bucket(4 * num_rows + 512)
    return (
        Buckets(small, small, merge, bucket(max(64, 8 * num_rows))),
        Buckets(large, large, merge, bucket(max(64, 32 * num_rows))),
    )


def capacity(max_rows: int, largest: Buckets, num_blocks: int) -> Capacity:
    """Computes the room of work lists for any graph.

    Args:
        max_rows: Of the largest graph.
        largest: Its highest level.
        num_blocks: Of the pool. A list names a block as often as its run is read apart, which only
            pays for short runs.
    """
    return Capacity(
        rows=bucket(max_rows),
        small=largest.small,
        large=largest.large,
        q_rows=bucket(32 * max_rows),
        blocks=min(bucket(2 * num_blocks + 64 * max_rows), MAX_BLOCK_IDS),
        partials=largest.partials,
    )


def smallest_level(available: Sequence[Buckets], needed: Iterable[Buckets]) -> int | None:
    """Finds the first level that starts enough programs for every work list; None if none does."""
    most = Buckets(*map(max, zip(*needed, strict=True)))
    for index, level in enumerate(available):
        if all(have >= need for have, need in zip(level, most, strict=True)):
            return index
    return None
