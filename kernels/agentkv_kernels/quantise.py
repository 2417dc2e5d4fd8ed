"""8-bit keys and values: one factor per token and head, beside the numbers.

Owns the meaning of a quantised cache, in plain PyTorch; the kernels follow it. It is sold as
capacity: half the bytes of bfloat16, for some precision.

    number = factor * stored,  factor = absmax(token, head) / largest stored number
"""

from typing import NamedTuple

import torch
from torch import Tensor

LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
"""What the largest number of a token and head is stored as, by the cache's dtype."""


class KVScales(NamedTuple):
    """Factors of one layer's 8-bit caches."""

    k: Tensor
    """(num_blocks, block_size, num_kv_heads) float32."""
    v: Tensor
    """The same, with the same strides."""


class Quantised(NamedTuple):
    """Numbers as a cache stores them."""

    stored: Tensor
    factor: Tensor
    """One per token and head, float32."""


def quantise(numbers: Tensor, dtype: torch.dtype) -> Quantised:
    """Rounds (..., head_dim) numbers to a dtype of LARGEST; zeros keep a factor of 0."""
    largest = LARGEST[dtype]
    factor = numbers.float().abs().amax(-1) / largest
    stored = numbers.float() / torch.where(factor == 0, 1.0, factor)[..., None]
    if dtype == torch.int8:
        stored = (stored + 0.5).floor()
    return Quantised(stored.to(dtype), factor)


def dequantise(cache: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns a whole cache (..., head_dim) as numbers of a floating dtype."""
    return (cache.float() * factor[..., None]).to(dtype)
