"""Whole models through the Triton kernels, in the interpreter."""

import pytest
import torch
from tiny_models import build_tiny_model

from agentkv.model.golden_check import check_model
from agentkv.model.model_shape import describe_model
from agentkv.model.sampler import Sampler


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss", "gemma3n", "mistral"])
def test_branches_equal_the_models_own_attention(family: str) -> None:
    """Catches an option of attention (window, softcap, sinks, another scale) lost on the way.

    A prefix in chunks, a fork inside a block, two branches that extend and decode in mixed steps,
    in a pool that is NaN wherever nothing was written.
    """
    model = build_tiny_model(family)
    report = check_model(
        model, describe_model(model), Sampler(), block_size=4, implementation="triton"
    )
    assert report.error < 1e-4


def test_half_precision() -> None:
    """Catches a model in bfloat16 that needs another dtype on the way."""
    model = build_tiny_model("llama", dtype=torch.bfloat16)
    report = check_model(
        model, describe_model(model), Sampler(), block_size=16, implementation="triton"
    )
    assert report.error < report.tolerance
