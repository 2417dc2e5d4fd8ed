"""Copies of partly filled blocks, all layers, K and V, in one launch.

Pairs within a launch happen at once; `waves` cuts a list wherever a later pair touches what an
earlier one writes or reads, so that the result is that of the order given.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from agentkv_kernels._triton.compat import launch_options
from agentkv_kernels.work_buffers import bucket

NUMBERS_AT_ONCE = 1024
PAIR_INTS = 4
"""Numbers of a pair on the device: source, target, tokens and padding."""


class Pair(NamedTuple):
    """Copies the first `num_tokens` slots of one block to another."""

    src: int
    dst: int
    num_tokens: int


@triton.jit
def copy_blocks_kernel(
    kv,  # (num_layers, 2, num_blocks, block_size, HEADS, HEAD_DIM)
    pairs,  # (capacity, 4) int32
    num_pairs,  # one int32: programs beyond leave at once
    layer_stride,
    kind_stride,
    block_stride,
    token_stride,
    head_stride,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Copies one pair in one layer, K or V."""
    index = tl.program_id(0)
    if index >= tl.load(num_pairs):
        return
    layer = (tl.program_id(1) // 2).to(tl.int64)
    kind = (tl.program_id(1) % 2).to(tl.int64)
    pair = pairs + index * 4
    base = kv + layer * layer_stride + kind * kind_stride
    src = base + tl.load(pair).to(tl.int64) * block_stride
    dst = base + tl.load(pair + 1).to(tl.int64) * block_stride
    count = tl.load(pair + 2) * (HEADS * HEAD_DIM)
    for first in range(0, count, BLOCK):
        number = first + tl.arange(0, BLOCK)
        token = number // (HEADS * HEAD_DIM)
        head = number // HEAD_DIM % HEADS
        place = token * token_stride + head * head_stride + number % HEAD_DIM
        tl.store(
            dst + place, tl.load(src + place, mask=number < count, other=0), mask=number < count
        )


def waves(pairs: Sequence[Pair]) -> list[list[Pair]]:
    """Cuts a list of copies into parts whose copies may happen in any order."""
    parts: list[list[Pair]] = []
    read: set[int] = set()
    written: set[int] = set()
    for pair in pairs:
        if not parts or pair.src in written or pair.dst in written or pair.dst in read:
            parts.append([])
            read, written = set(), set()
        parts[-1].append(pair)
        read.add(pair.src)
        written.add(pair.dst)
    return parts


def copy_blocks(kv: Tensor, pairs: Sequence[Pair]) -> None:
    """Copies pairs in their order; arguments as in `ops.copy_blocks`, checked there."""
    for part in waves(pairs):
        table = torch.zeros((1 + bucket(len(part)), PAIR_INTS), dtype=torch.int32)
        table[0, 0] = len(part)
        table[1 : 1 + len(part), :3] = torch.tensor(part, dtype=torch.int32)
        launch_copies(kv, table.to(kv.device))


def launch_copies(kv: Tensor, table: Tensor) -> None:
    """Copies the pairs of a table on the device, in one launch and in no particular order.

    Args:
        kv: (num_layers, 2, num_blocks, block_size, num_kv_heads, head_dim), stride 1 in the last
            dimension.
        table: (1 + capacity, PAIR_INTS) int32, contiguous, on kv's device. Row 0 holds the number
            of pairs, the others a pair each. A graph may be captured with it and replayed with
            other contents.
    """
    num_layers, _, _, _, num_kv_heads, head_dim = kv.shape
    if kv.element_size() == 1:  # moved as bytes: an 8-bit float may lack loads of its own
        kv = kv.view(torch.int8)
    copy_blocks_kernel[(table.shape[0] - 1, num_layers * 2)](
        kv,
        table[1:],
        table,
        *kv.stride()[:5],
        HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        BLOCK=NUMBERS_AT_ONCE,
        **launch_options(4),
    )
