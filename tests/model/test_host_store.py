"""Rows of the host tier: what is packed comes back, to the bit or to 8 bits, or not at all."""

import pytest
import torch
from tiny_models import build_tiny_model
from torch import Tensor

from agentkv.core.block_move import BlockMove, Place, Tier
from agentkv.model.block_mover import BlockMover
from agentkv.model.host_store import CompactStore
from agentkv.model.kv_cache import KVCache
from agentkv.model.model_shape import describe_model


def filled_cache(family: str = "llama", dtype: torch.dtype | None = None) -> KVCache:
    """A pool of noise."""
    shape = describe_model(build_tiny_model(family))
    kv = KVCache(shape, num_blocks=6, block_size=4, dtype=dtype)
    generator = torch.Generator().manual_seed(5)
    for block_id in range(6):
        for part in kv.block(block_id):
            part.copy_(100 * torch.rand(part.shape, generator=generator) - 50)
    return kv


def content(kv: KVCache, block_id: int) -> list[Tensor]:
    """Copies a block's tensors."""
    return [part.clone() for part in kv.block(block_id)]


@pytest.mark.parametrize(
    ("family", "dtype"), [("llama", None), ("gemma3", None), ("llama", torch.int8)]
)
def test_a_row_is_exact(family: str, dtype: torch.dtype | None) -> None:
    """Catches a layer, a head or a factor left out, or put elsewhere."""
    kv = filled_cache(family, dtype)
    store = CompactStore(kv, 3)
    before = content(kv, 2)
    untouched = content(kv, 4)
    store.save(2, 1)
    assert store.load(1, 5)
    assert all(map(torch.equal, content(kv, 5), before))
    assert all(map(torch.equal, content(kv, 4), untouched))


def test_an_8_bit_row_is_small_and_close() -> None:
    """Catches rounding per block instead of per token and head, and rows that save nothing."""
    kv = filled_cache()
    store, exact = CompactStore(kv, 1, rounds=True), CompactStore(kv, 1)
    assert store.num_bytes < 0.5 * exact.num_bytes  # tiny heads: the factors weigh more
    before = content(kv, 2)
    store.save(2, 0)
    assert store.load(0, 5)
    for new, old in zip(content(kv, 5), before, strict=True):
        bound = old.abs().amax(-1, keepdim=True) / 127
        assert ((new - old).abs() <= bound).all()


def test_what_was_not_saved_is_not_loaded() -> None:
    """Catches an empty, spoilt or changed row taken for KV."""
    kv = filled_cache()
    store = CompactStore(kv, 2)
    assert not store.load(0, 1)
    store.save(2, 0)
    store._rows[0, 17] ^= 1
    before = content(kv, 1)
    assert not store.load(0, 1) and store.read(0) is None
    assert all(map(torch.equal, content(kv, 1), before))
    store.save(2, 0)
    store.spoil(0)
    assert not store.load(0, 1)


def test_moves_are_done_in_order() -> None:
    """Catches a block overwritten before it was carried off, where a step reuses its place."""
    kv = filled_cache()
    mover = BlockMover(CompactStore(kv, 1))
    first, second = content(kv, 0), content(kv, 1)
    device, host = [Place(Tier.DEVICE, n) for n in range(6)], Place(Tier.HOST, 0)
    moves = [
        BlockMove(device[0], host),
        BlockMove(host, device[3]),
        BlockMove(device[1], host),
        BlockMove(host, device[0]),
    ]
    assert not mover.move(moves)
    assert all(map(torch.equal, content(kv, 3), first))
    assert all(map(torch.equal, content(kv, 0), second))


def test_a_failed_move_spoils_those_that_follow_from_it() -> None:
    """Catches garbage of a failed move carried on as if it were KV."""
    kv = filled_cache()
    mover = BlockMover(CompactStore(kv, 2))
    good = BlockMove(Place(Tier.DEVICE, 0), Place(Tier.HOST, 1))
    never_saved = BlockMove(Place(Tier.HOST, 0), Place(Tier.DEVICE, 2))
    out_of_range = BlockMove(Place(Tier.DEVICE, 99), Place(Tier.HOST, 0))
    after = BlockMove(Place(Tier.HOST, 0), Place(Tier.DEVICE, 3))
    moves = [good, never_saved, out_of_range, after]
    assert mover.move(moves) == [never_saved, out_of_range, after]
