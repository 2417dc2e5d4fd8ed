"""Compiles a model with torch.compile, as an option.

The attention function stays outside of what is compiled: it reads a plan that is new at every
step, and must neither be traced nor be guarded on. The step object that carries the plan is the
same at every step, so a guard on it always holds.
"""

import os
import shutil
from typing import Any

import torch
from transformers import PreTrainedModel

from agentkv.errors import InvalidRequest
from agentkv.model.attention import use_agentkv_attention


def check_can_compile(device: torch.device) -> None:
    """Refuses where torch.compile would fail at the first step.

    Raises:
        InvalidRequest: Says what is missing.
    """
    if device.type == "cpu" and shutil.which(os.environ.get("CXX", "g++")) is None:
        raise InvalidRequest(
            "torch.compile on a CPU needs a C++ compiler and finds no g++; install one, or leave "
            "out --compile."
        )


def compile_model(model: PreTrainedModel, *, backend: str = "inductor") -> None:
    """Makes the model compile its forward at the first call, in place.

    Args:
        model: On its device, with its final weights.
        backend: Of torch.compile; a test takes one that generates no code.

    Raises:
        InvalidRequest: There is no compiler.
    """
    check_can_compile(model.device)
    use_agentkv_attention(model, is_traced=False)
    untyped: Any = model
    untyped.compile(backend=backend)
