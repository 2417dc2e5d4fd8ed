"""Packed projections: the same numbers, one copy of the weights, and who is left alone."""

import pytest
import torch
from hand_forked import HandForked
from tiny_models import VOCAB_SIZE, build_tiny_model
from torch import Tensor, nn

from agentkv.model.fused_linear import FusedProjection, fuse_projections


class Block(nn.Module):
    """Three projections of one input, as models name them."""

    def __init__(self, *, bias: bool = True) -> None:
        super().__init__()
        self.q_proj = nn.Linear(6, 8, bias=bias)
        self.k_proj = nn.Linear(6, 4, bias=bias)
        self.v_proj = nn.Linear(6, 4, bias=bias)

    def parts(self, given: Tensor) -> list[Tensor]:
        return [self.q_proj(given), self.k_proj(given), self.v_proj(given)]


def pair(*, bias: bool = True) -> tuple[Block, Block]:
    """Two equal blocks, the second one packed."""
    blocks = []
    for _ in range(2):
        torch.manual_seed(0)
        blocks.append(Block(bias=bias).eval().requires_grad_(False))
    assert fuse_projections(blocks[1]) == 1
    return blocks[0], blocks[1]


@pytest.mark.parametrize("bias", [True, False])
def test_parts_are_those_of_separate_products(bias: bool) -> None:
    """Catches parts in the wrong order, or a bias that is lost."""
    plain, packed = pair(bias=bias)
    for rows in (1, 3):
        given = torch.randn(1, rows, 6)
        for ours, theirs in zip(packed.parts(given), plain.parts(given), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


def test_another_input_gets_its_own_product() -> None:
    """Catches keys of the input before: cross attention projects two different ones."""
    plain, packed = pair()
    mine, other = torch.randn(2, 6), torch.randn(2, 6)
    torch.testing.assert_close(packed.q_proj(mine), plain.q_proj(mine))
    torch.testing.assert_close(packed.k_proj(other), plain.k_proj(other))
    torch.testing.assert_close(packed.v_proj(mine), plain.v_proj(mine))
    torch.testing.assert_close(packed.v_proj(mine), plain.v_proj(mine))


def test_nothing_is_kept_after_the_last_part() -> None:
    """Catches a step's activations that stay alive until the next step."""
    _, packed = pair()
    packed.parts(torch.randn(2, 6))
    assert isinstance(packed.q_proj, FusedProjection)
    assert packed.q_proj._packed._input is None


def test_weights_are_shared_not_copied() -> None:
    """Catches a model that takes twice its memory, or weights that no longer reach a product."""
    plain, packed = pair()
    weights = [packed.q_proj.weight, packed.k_proj.weight, packed.v_proj.weight]
    assert len({weight.untyped_storage().data_ptr() for weight in weights}) == 1
    assert weights[0].untyped_storage().nbytes() == sum(weight.nbytes for weight in weights)
    assert {name: part.shape for name, part in packed.state_dict().items()} == {
        name: part.shape for name, part in plain.state_dict().items()
    }
    for weight, before in zip(packed.parameters(), plain.parameters(), strict=True):
        assert torch.equal(weight, before)


class Quantised(nn.Linear):
    """Stands for a layer whose weight is stored in another form."""


def test_layers_that_do_not_fit_are_left_alone() -> None:
    """Catches packing what only looks alike: quantised, hooked, tied, or of another kind."""
    blocks = [Block() for _ in range(6)]
    blocks[0].k_proj = Quantised(6, 4)
    blocks[1].k_proj = nn.Linear(5, 4)
    blocks[2].k_proj = nn.Linear(6, 4, bias=False)
    blocks[3].k_proj = nn.Linear(6, 4, dtype=torch.float64)
    blocks[4].k_proj.register_forward_pre_hook(lambda *_: None)
    blocks[5].k_proj.weight = blocks[5].v_proj.weight
    assert fuse_projections(nn.ModuleList(blocks)) == 0


@pytest.mark.parametrize(("family", "num_groups"), [("llama", 4), ("qwen2", 4), ("gpt2", 0)])
def test_models_answer_as_before(family: str, num_groups: int) -> None:
    """Catches a family that calls its projections in a way that packing does not serve."""
    plain, packed = HandForked(build_tiny_model(family)), HandForked(build_tiny_model(family))
    assert fuse_projections(packed.model) == num_groups
    seen = []
    for run in (plain, packed):
        root = run.create()
        steps = run.step((root, [5, 17, 3, 88, 41]))
        branches = [root, run.fork(root, 3)]
        for token in (1, VOCAB_SIZE - 1):
            steps += run.step(*((branch, [token]) for branch in branches))
        seen.append(torch.cat(steps))
    torch.testing.assert_close(seen[1], seen[0], rtol=0, atol=1e-5)
