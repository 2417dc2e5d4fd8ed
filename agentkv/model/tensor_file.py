"""Tensors as the bytes of a safetensors file, and back, checked against what is expected.

It reads no file and keeps no name: what is expected is an argument, so that a file cannot say how
much memory it takes.
"""

from collections.abc import Mapping

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor


def encode(tensors: Mapping[str, Tensor]) -> bytes:
    """Writes tensors of the host as one file."""
    encoded: bytes = save(dict(tensors))
    return encoded


def decode(
    data: bytes, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype
) -> dict[str, Tensor] | None:
    """Reads a file that should hold tensors of these names and shapes, all of one dtype.

    Returns:
        The tensors; None when the file is none, or holds something else.
    """
    try:
        tensors: dict[str, Tensor] = load(data)
    except (SafetensorError, ValueError, KeyError, RuntimeError):
        return None
    found = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}
    if found != {name: (shape, dtype) for name, shape in shapes.items()}:
        return None
    return tensors
