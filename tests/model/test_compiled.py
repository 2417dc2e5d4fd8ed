"""torch.compile as an option: attention stays outside, one program serves every step."""

import pytest
import torch
import torch._dynamo.utils
from hand_forked import HandForked
from tiny_models import build_tiny_model

from agentkv.errors import InvalidRequest
from agentkv.model.attention import UNTRACED_NAME
from agentkv.model.compiled import compile_model
from agentkv.model.fused_linear import fuse_projections
from agentkv.model.golden_check import check_model
from agentkv.model.model_shape import describe_model
from agentkv.model.sampler import Sampler


@pytest.mark.slow
def test_a_compiled_model_answers_as_before_and_is_compiled_once() -> None:
    """Catches a plan or a step that is guarded on: every step would compile the model again."""
    run = HandForked(build_tiny_model("llama"))
    fuse_projections(run.model)
    compile_model(run.model, backend="eager")
    root = run.create()
    run.step((root, [5, 17, 3, 88, 41]))
    run.step((root, [7]))
    run.step((root, [2, 3]))
    torch._dynamo.utils.counters.clear()
    seen = [run.step((root, [token]))[0] for token in (1, 2, 3)]
    fork = run.fork(root, 7)
    run.step((fork, [4, 5, 6, 7]))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 0
    torch.testing.assert_close(torch.cat(seen), run.expected(root)[8:], rtol=0, atol=1e-5)


@pytest.mark.slow
def test_the_golden_check_proves_what_was_compiled() -> None:
    """Catches a check that falls back to the model before compilation, or leaves it there."""
    model = build_tiny_model("llama")
    shape = describe_model(model)
    compile_model(model, backend="eager")
    torch._dynamo.utils.counters.clear()
    assert check_model(model, shape, Sampler(), block_size=4).error < 1e-4
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
    assert model.config._attn_implementation == UNTRACED_NAME


def test_a_missing_compiler_is_said_before_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a traceback of the compiler's in the middle of the first request."""
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(InvalidRequest, match=r"needs a C\+\+ compiler"):
        compile_model(build_tiny_model("llama"))
