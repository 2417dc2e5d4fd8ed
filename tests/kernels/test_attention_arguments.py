"""tree_attention names the argument that does not fit, before anything is computed."""

from typing import Any

import pytest
import torch

from agentkv_kernels import AttentionPlan, KVRun, tree_attention

PLAN = AttentionPlan.build([KVRun(0, 3, [1], range(2))], [3, 3], block_size=4)


def attend(**changed: Any) -> torch.Tensor:
    """Calls with arguments that fit, but for those given."""
    arguments: dict[str, Any] = {
        "query": torch.ones(2, 4, 8),
        "k_cache": torch.ones(3, 4, 2, 8),
        "v_cache": torch.ones(3, 4, 2, 8),
        "plan": PLAN,
        "scale": 0.5,
    }
    return tree_attention(**{**arguments, **changed})


def test_what_fits_is_accepted() -> None:
    """Catches the base of the other tests being wrong itself."""
    assert torch.equal(attend(), torch.ones(2, 4, 8))
    assert torch.equal(attend(implementation="reference"), torch.ones(2, 4, 8))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"query": torch.ones(2, 4)}, "query must have shape"),
        ({"query": torch.ones(2, 4, 6)}, "query must have shape"),
        ({"query": torch.ones(2, 3, 8)}, "query has 3 heads"),
        ({"query": torch.ones(3, 4, 8)}, "plan has 2 rows, query 3"),
        ({"k_cache": torch.ones(3, 4, 8)}, "k_cache must have shape"),
        ({"v_cache": torch.ones(3, 4, 8)}, "v_cache must have shape"),
        ({"v_cache": torch.ones(3, 4, 1, 8)}, "v_cache must match k_cache"),
        (
            {"k_cache": torch.ones(3, 8, 2, 8), "v_cache": torch.ones(3, 8, 2, 8)},
            "plan has blocks of 4, k_cache of 8",
        ),
        ({"window": 0}, "window must be positive"),
        ({"softcap": 0.0}, "softcap must be positive"),
        ({"softcap": float("nan")}, "softcap must be positive"),
        ({"sinks": torch.ones(2)}, "sinks must have shape"),
        ({"implementation": "fast"}, "implementation must be"),
        ({"implementation": "triton"}, "query is on cpu; implementation 'triton' needs a CUDA"),
        ({"batch_invariant": True}, "batch_invariant needs implementation"),
        (
            {"k_cache": torch.ones(1, 4, 2, 8), "v_cache": torch.ones(1, 4, 2, 8)},
            "plan reads block 1, k_cache has 1",
        ),
    ],
)
def test_values_refused(changed: dict[str, Any], message: str) -> None:
    """Catches a mismatch that would read or broadcast something else."""
    with pytest.raises(ValueError, match=message):
        attend(**changed)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"query": torch.ones(2, 4, 8).int()}, "query must be one of"),
        ({"query": torch.ones(2, 4, 8).half()}, "k_cache is torch.float32, query torch.float16"),
        ({"v_cache": torch.ones(3, 4, 2, 8).half()}, "v_cache is torch.float16"),
    ],
)
def test_types_refused(changed: dict[str, Any], message: str) -> None:
    """Catches silent promotion between a query and its caches."""
    with pytest.raises(TypeError, match=message):
        attend(**changed)
