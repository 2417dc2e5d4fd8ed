"""What differs between Triton's versions, and between a device and the interpreter.

Owns the answers to two questions: may these tensors be used here, and how are launches compiled.
"""

from typing import Any

import torch
from torch import Tensor
from triton import knobs

INTERPRETED = bool(knobs.runtime.interpret)
"""Kernels run in Triton's interpreter, on CPU tensors: TRITON_INTERPRET=1 at import."""


def check_device(name: str, tensor: Tensor) -> None:
    """Refuses a tensor that kernels cannot reach from here.

    Raises:
        ValueError: Names the argument.
    """
    usable = tensor.is_cuda or (INTERPRETED and tensor.device.type == "cpu")
    if not usable:
        raise ValueError(
            f"{name} is on {tensor.device}; implementation 'triton' needs a CUDA device, or "
            "TRITON_INTERPRET=1 set before triton is imported"
        )


def launch_options(num_warps: int, num_stages: int = 1) -> dict[str, Any]:
    """Returns the keyword arguments of a launch that decide how a kernel is compiled.

    Fusing multiplication and addition is asked for, not left to a default that differs between
    versions of Triton.
    """
    return {"num_warps": num_warps, "num_stages": num_stages, "enable_fp_fusion": True}


def upcasts(dtype: torch.dtype) -> bool:
    """Whether products must be computed in float32.

    The interpreter multiplies the bit patterns of bfloat16 operands instead of their values.
    """
    return INTERPRETED and dtype == torch.bfloat16
