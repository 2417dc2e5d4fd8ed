"""Runs what tests the sampler once for each form of it that this machine has."""

import pytest

from agentkv.model.sampler import Sampler
from agentkv_kernels import native

LEVELS = native.available_levels()
# What chooses tokens is the same at all levels between the best and the last.
FORMS = ["torch", *dict.fromkeys([*LEVELS[:1], *LEVELS[-1:]])]


@pytest.fixture(params=FORMS, scope="module")
def sampler(request: pytest.FixtureRequest) -> Sampler:
    """The sampler in torch alone, or with the native kernels of one level."""
    level: str = request.param
    return Sampler(None if level == "torch" else native.native_at(level))
