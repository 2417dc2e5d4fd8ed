"""Angles by position: the module's own, whoever else is asked for."""

from typing import Any

import pytest
import torch
from tiny_models import build_tiny_model

from agentkv.model.angle_table import AngleTable

HIDDEN = torch.zeros(1, 1, 64)


def rotary_of(**changes: Any) -> Any:
    model: Any = build_tiny_model("llama", hidden_size=64, head_dim=16, **changes)
    return model.model.rotary_emb


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default", "rope_theta": 10_000.0},
        {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0},
        {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 2.0},
    ],
    ids=lambda rope: rope["rope_type"],
)
def test_angles_are_the_modules_own(rope: dict[str, Any]) -> None:
    """Catches a table of the wrong positions, and one that keeps what changes with the longest."""
    table = AngleTable(rotary_of(rope_parameters=rope, max_position_embeddings=64))
    own = rotary_of(rope_parameters=rope, max_position_embeddings=64)
    for positions in ([[0, 5, 63]], [[2000]], [[1023, 1024, 7, 7]], [[3]]):
        asked = torch.tensor(positions)
        expected = own(HIDDEN, position_ids=asked)
        for found, wanted in zip(table.at(HIDDEN, asked), expected, strict=True):
            torch.testing.assert_close(found, wanted, rtol=0, atol=1e-6)


def test_a_rows_angles_are_the_same_in_any_company() -> None:
    """Catches a last bit that depends on how many rows a vectorised sine computes at once."""
    rotary = rotary_of()
    alone = [AngleTable(rotary).at(HIDDEN, torch.tensor([[place]])) for place in (900, 17, 2500)]
    together = AngleTable(rotary).at(HIDDEN, torch.tensor([[900, 17, 2500]]))
    for row, angles in enumerate(alone):
        assert torch.equal(together.cosines[0, row], angles.cosines[0, 0])
        assert torch.equal(together.sines[0, row], angles.sines[0, 0])
