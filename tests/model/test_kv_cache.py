"""The tensors behind block ids: copies, sizes, which layer reads what."""

import pytest
import torch
from tiny_models import build_tiny_model
from torch import Tensor

from agentkv.core.batch import BlockCopy
from agentkv.model.kv_cache import KVCache
from agentkv.model.model_shape import LayerShape, ModelShape, describe_model

BLOCK_SIZE = 16
NUM_BLOCKS = 8


def make_cache(*layers: LayerShape, dtype: torch.dtype | None = None) -> KVCache:
    shape = ModelShape(
        architecture="Made up",
        layers=layers
        or (
            LayerShape(2, 8, 0, None),
            LayerShape(2, 8, 1, None),
            LayerShape(1, 16, 2, 8),
            LayerShape(2, 8, 0, None),
        ),
        dtype=torch.float32,
        device=torch.device("cpu"),
        vocab_size=97,
    )
    return KVCache(shape, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, dtype=dtype)


def all_layers(kv: KVCache) -> list[Tensor]:
    return [tensor for layer in range(kv.shape.num_layers) for tensor in kv.layer(layer)]


def fill_at_random(kv: KVCache) -> None:
    generator = torch.Generator().manual_seed(0)
    for tensor in all_layers(kv):
        tensor.copy_(torch.randn(tensor.shape, generator=generator))


@pytest.mark.parametrize("source", [0, 5, NUM_BLOCKS - 1])
def test_case_002_copy_at_an_offset_is_byte_equal_in_every_layer(source: int) -> None:
    """Catches a copy that reads or writes zeros away from block 0, or skips a layer, K or V."""
    kv = make_cache()
    fill_at_random(kv)
    before = [tensor.clone() for tensor in all_layers(kv)]
    kv.copy([BlockCopy(source, 3, 8)])
    for now, then in zip(all_layers(kv), before, strict=True):
        assert torch.equal(now[3, :8], then[source, :8])
        assert torch.equal(now[3, 8:], then[3, 8:])
        others = [block for block in range(NUM_BLOCKS) if block != 3]
        assert torch.equal(now[others], then[others])
        assert then[source, :8].abs().min() > 0


def test_copies_are_done_in_order() -> None:
    """Catches copies done at once, where a chain of two would read the old content."""
    kv = make_cache()
    fill_at_random(kv)
    first = [tensor[0].clone() for tensor in all_layers(kv)]
    kv.copy([BlockCopy(0, 1, BLOCK_SIZE), BlockCopy(1, 2, 4)])
    for tensor, expected in zip(all_layers(kv), first, strict=True):
        assert torch.equal(tensor[2, :4], expected[:4])


def test_no_copies_touch_nothing() -> None:
    """Catches an empty list of copies that is refused or copies something."""
    kv = make_cache()
    fill_at_random(kv)
    before = [tensor.clone() for tensor in all_layers(kv)]
    kv.copy([])
    assert all(map(torch.equal, all_layers(kv), before))


def test_layers_do_not_overlap_and_readers_share_their_donor() -> None:
    """Catches two layers in one storage, and a KV-sharing layer that reads its own empty one."""
    kv = make_cache()
    for number, layer in enumerate((0, 1, 2)):
        for part, tensor in enumerate(kv.layer(layer)):
            tensor.fill_(10 * number + part)
    for number, layer in enumerate((0, 1, 2)):
        keys, values = kv.layer(layer)
        assert bool((keys == 10 * number).all())
        assert bool((values == 10 * number + 1).all())
    assert kv.layer(3)[0].data_ptr() == kv.layer(0)[0].data_ptr()
    assert [kv.owns_kv(layer) for layer in range(4)] == [True, True, True, False]


@pytest.mark.parametrize("family", ["llama", "gemma3n", "gemma4_two_dims"])
def test_bytes_per_block_are_those_allocated(family: str) -> None:
    """Catches a pool sized for another number of heads or layers than it allocates."""
    kv = KVCache(describe_model(build_tiny_model(family)), num_blocks=3, block_size=BLOCK_SIZE)
    tensors = {tensor.data_ptr(): tensor for tensor in all_layers(kv)}
    allocated = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    assert 3 * kv.bytes_per_block == allocated
    assert kv.bytes_per_block == kv.shape.bytes_per_block(BLOCK_SIZE)


def test_poison_fills_every_layer() -> None:
    """Catches poison that misses a layer: tests that rely on it would prove nothing there."""
    kv = make_cache()
    kv.poison(float("nan"))
    assert all(bool(tensor.isnan().all()) for tensor in all_layers(kv))


def test_blocks_out_of_the_pool_are_refused_before_any_copy() -> None:
    """Catches a bad id that wraps around to the last block."""
    kv = make_cache()
    fill_at_random(kv)
    before = [tensor.clone() for tensor in all_layers(kv)]
    with pytest.raises(ValueError, match="dst"):
        kv.copy([BlockCopy(0, 1, 4), BlockCopy(0, -1, 4)])
    assert all(map(torch.equal, all_layers(kv), before))


def all_scales(kv: KVCache) -> list[Tensor]:
    found = [kv.scales(layer) for layer in range(kv.shape.num_layers)]
    return [factors for scales in found if scales is not None for factors in scales]


def test_a_pool_of_8_bits_keeps_factors_beside_its_numbers() -> None:
    """Catches factors of another layer, or memory that is not counted."""
    kv = make_cache(dtype=torch.int8)
    assert all(part.dtype == torch.int8 for part in all_layers(kv))
    assert [tuple(part.shape) for part in all_scales(kv)[:2]] == [(NUM_BLOCKS, BLOCK_SIZE, 2)] * 2
    own = [(kv.layer(layer), kv.scales(layer)) for layer in (0, 1, 2)]
    parts = [part for numbers, scales in own for part in (*numbers, *(scales or ()))]
    assert sum(part.nbytes for part in parts) == NUM_BLOCKS * kv.bytes_per_block
    assert len({part.data_ptr() for part in parts}) == 12
    assert all_scales(make_cache()) == []


def test_copies_take_the_factors_along() -> None:
    """Catches a copied block whose numbers are read with the factors of its last owner."""
    kv = make_cache(dtype=torch.int8)
    for number, part in enumerate(all_scales(kv)):
        part.zero_()
        part[5] = number + 1.0
    kv.copy([BlockCopy(5, 3, 8)])
    for number, part in enumerate(all_scales(kv)[:6]):
        assert torch.equal(part[3, :8], torch.full((8, part.shape[2]), part[5, 0, 0].item()))
        assert not part[3, 8:].any(), number


def test_poison_reaches_a_pool_of_8_bits() -> None:
    """Catches a test on such a pool that proves nothing, as integers hold no NaN."""
    kv = make_cache(dtype=torch.int8)
    kv.poison(float("nan"))
    assert all(part.isnan().all() for part in all_scales(kv))
