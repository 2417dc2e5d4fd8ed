"""Products with 8-bit weights against what the integers mean in float64, on every level."""

import pytest
import torch
from torch import Tensor

from agentkv_kernels import native
from agentkv_kernels.int8_weights import GROUP, Int8Products, Int8Weights, Norm, round_rows

LEVELS = [None, *native.available_levels()]


def library(level: str | None) -> native.NativeLibrary | None:
    return None if level is None else native.native_at(level)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def exact(rows: Tensor, weights: Int8Weights) -> Tensor:
    """What the integers of rows and weights mean, in float64."""
    integers, factors = round_rows(rows)
    meant = (integers.double() * factors.double()[..., None]).flatten(-2)
    return meant @ weights.dequantised().double().T


def distance(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("num_rows", [1, 2, 3, 5, 6, 7, 16, 33])
def test_product_means_its_integers(level: str | None, num_rows: int) -> None:
    """Catches a tile that leaves rows out, mixes panels, or adds the shift of another group."""
    weights = Int8Weights.pack(random(72, 192, seed=1), library(level))  # the last panel lacks 24
    rows = random(num_rows, 192) * random(num_rows, 1, seed=2).exp()
    bias = random(72, seed=3)
    found = Int8Products(library(level)).linear(rows, weights, bias)
    assert found.shape == (num_rows, 72)
    assert distance(found.double(), exact(rows, weights) + bias) < 2e-6


@pytest.mark.parametrize("level", native.available_levels())
def test_rows_are_the_same_to_the_bit_however_work_is_divided(level: str) -> None:
    """Catches parts that lose or repeat a panel, and a look ahead that is more than a look.

    Panels are cut among threads in parts of several, rows into tiles: neither may show.
    """
    products = Int8Products(library(level))
    num_threads = torch.get_num_threads()
    weights = Int8Weights.pack(random(32 * 37 + 5, 128, seed=1), library(level))
    rows = random(41, 128)
    try:
        torch.set_num_threads(1)
        alone = torch.cat([products.linear(row[None], weights) for row in rows])
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            assert torch.equal(products.linear(rows, weights), alone)
    finally:
        torch.set_num_threads(num_threads)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_extreme_integers_do_not_overflow(level: str | None, sign: float) -> None:
    """Catches sums that wrap: all of a group at 127 or -127, where the shift is greatest too."""
    weights = Int8Weights.pack(torch.full((32, 64), sign), library(level))
    found = Int8Products(library(level)).linear(torch.full((7, 64), -sign), weights)
    assert distance(found.double(), torch.full((7, 32), -64.0, dtype=torch.float64)) < 1e-6


@pytest.mark.parametrize("level", LEVELS)
def test_weights_are_rounded_to_a_half_step(level: str | None) -> None:
    """Catches a factor of the wrong group, and a layout that differs from torch's."""
    weight = random(64, 128) * random(64, 1, seed=1).exp()
    weight[3, :GROUP] = 0.0
    weights = Int8Weights.pack(weight, library(level))
    steps = weight.view(64, -1, GROUP).abs().amax(-1, keepdim=True) / 127
    error = (weights.dequantised() - weight).view(64, -1, GROUP).abs()
    assert bool((error <= steps * 0.5001).all())
    by_torch = Int8Weights.pack(weight, None)
    assert distance(weights.dequantised(), by_torch.dequantised()) < 1e-4


@pytest.mark.parametrize("level", LEVELS)
def test_parts_are_the_products_of_their_own_weights(level: str | None) -> None:
    """Catches a view of a packed group that reads the panels of its neighbour."""
    products = Int8Products(library(level))
    first, second, rows = random(64, 64, seed=1), random(64, 64, seed=2), random(4, 64)
    both = Int8Weights.pack_in_turn([first, second], library(level))
    for index, weight in enumerate((first, second)):
        alone = products.linear(rows, Int8Weights.pack(weight, library(level)))
        assert torch.equal(products.linear(rows, both.part(index, 4, 2)), alone)
    whole = Int8Weights.pack(torch.cat((first, second)), library(level))
    alone = products.linear(rows, Int8Weights.pack(second, library(level)))
    assert torch.equal(products.linear(rows, whole.part(2, 4)), alone)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_row_that_is_not_finite_fails_alone(level: str | None, bad: float) -> None:
    """Catches a NaN that is rounded to some integer: the row's tokens would look sound."""
    rows = random(3, 128)
    weights = Int8Weights.pack(random(32, 128, seed=1), library(level))
    whole = Int8Products(library(level)).linear(rows, weights)
    rows[1, 70] = bad
    found = Int8Products(library(level)).linear(rows, weights)
    assert bool(found[1].isnan().all())
    assert torch.equal(found[[0, 2]], whole[[0, 2]])


@pytest.mark.parametrize("level", LEVELS)
def test_rows_of_an_embedding_are_the_weights(level: str | None) -> None:
    """Catches a lookup that takes the factors of another token."""
    weights = Int8Weights.pack(random(96, 128), library(level))
    tokens = torch.tensor([[95, 0], [33, 33]])
    assert torch.equal(weights.rows(tokens), weights.dequantised()[tokens])


@pytest.mark.parametrize("level", native.available_levels())
def test_native_rows_of_an_embedding_are_torchs(level: str) -> None:
    """Catches a byte of another output or group, and a read behind the last output."""
    weights = Int8Weights.pack(random(70, 192, seed=1), library(level))  # the last panel lacks 26
    outputs = torch.tensor([[0, 31, 32], [69, 5, 64]])
    products = Int8Products(library(level))
    assert torch.equal(products.rows(outputs, weights), weights.rows(outputs))
    assert bool(products.rows(torch.tensor([70, -1]), weights).isnan().all())


@pytest.mark.parametrize("level", LEVELS)
def test_a_norm_before_a_product(level: str | None) -> None:
    """Catches a norm that is left out, or one whose epsilon or weight is another's."""
    weights = Int8Weights.pack(random(40, 128, seed=1), library(level))
    norm = Norm(random(128, seed=2), 0.5)
    products, rows = Int8Products(library(level)), random(9, 128) * 0.3
    found = products.linear(rows, weights, random(40, seed=3), norm)
    expected = products.linear(norm.apply(rows), weights, random(40, seed=3))
    assert distance(found, expected) < 1e-3  # a last bit may round to the other integer
