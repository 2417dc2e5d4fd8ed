"""What moves KV: store_kv, copy_blocks, allocate_kv."""

import math

import pytest
import torch

from agentkv_kernels import allocate_kv, copy_blocks, store_kv


def pool(layout: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A pool of 2 layers, 6 blocks of 4, 2 heads of 8, filled with distinct numbers."""
    kv = allocate_kv(2, 6, 4, 2, 8, dtype=dtype, device="cpu")
    kv.copy_(torch.arange(kv.numel()).view(kv.shape) % 251)
    if layout == "head-major blocks":
        kv = kv.transpose(3, 4).contiguous().transpose(3, 4)
    return kv


LAYOUTS = pytest.mark.parametrize("layout", ["token-major", "head-major blocks"])


@LAYOUTS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_store_writes_its_slots_and_skips_padding(layout: str, dtype: torch.dtype) -> None:
    """Catches -1 wrapping to the last slot, and a write that lands in a copy of the cache."""
    kv = pool(layout, dtype)
    before = kv.clone()
    key = torch.full((4, 2, 8), -1.0, dtype=dtype)
    value = torch.full((4, 2, 8), -2.0, dtype=dtype)
    store_kv(key, value, kv[1, 0], kv[1, 1], torch.tensor([-1, 22, 0, -1]))
    expected = before.clone()
    for block, offset in ((5, 2), (0, 0)):
        expected[1, 0, block, offset] = -1.0
        expected[1, 1, block, offset] = -2.0
    assert torch.equal(kv, expected)


@LAYOUTS
def test_store_takes_any_key_strides(layout: str) -> None:
    """Catches keys read as dense: the model hands over a transposed view."""
    kv = pool(layout)
    key = torch.randn(2, 3, 8).transpose(0, 1)
    store_kv(key, key, kv[0, 0], kv[0, 1], torch.tensor([4, 5, 9]))
    assert torch.equal(kv[0, 0, 1, :2], key[:2])
    assert torch.equal(kv[0, 1, 2, 1], key[2])


def test_store_of_nothing() -> None:
    """Catches a batch without rows, or of padding only, failing or writing."""
    kv = pool("token-major")
    before = kv.clone()
    for count in (0, 3):
        rows = torch.ones(count, 2, 8)
        store_kv(rows, rows, kv[0, 0], kv[0, 1], torch.full((count,), -1))
    assert torch.equal(kv, before)


@LAYOUTS
def test_copy_touches_only_its_tokens(layout: str) -> None:
    """Catches a copy that overwrites the destination's other slots, or misses a layer."""
    kv = pool(layout)
    expected = kv.clone()
    expected[:, :, 4, :3] = expected[:, :, 1, :3]
    expected[:, :, 0, :1] = expected[:, :, 2, :1]
    copy_blocks(kv, [1, 2, 3], [4, 0, 5], [3, 1, 0])
    assert torch.equal(kv, expected)


def test_copies_happen_in_order() -> None:
    """Catches reordering: a block read by one copy may be reused by the next."""
    kv = pool("token-major")
    first, second = kv[:, :, 1].clone(), kv[:, :, 2].clone()
    copy_blocks(kv, [1, 2], [3, 1], [4, 4])
    assert torch.equal(kv[:, :, 3], first)
    assert torch.equal(kv[:, :, 1], second)


def test_copy_reads_only_its_tokens() -> None:
    """Catches a copy that carries along slots nobody owns."""
    kv = pool("token-major")
    kv[:, :, 1, 2:] = math.nan
    copy_blocks(kv, [1], [0], [2])
    assert kv[:, :, 0].isfinite().all()


def test_allocated_pool_is_in_order() -> None:
    """Catches a layout in which consecutive blocks are no longer one view."""
    kv = allocate_kv(3, 5, 4, 2, 8, dtype=torch.float16, device="cpu")
    assert kv.shape == (3, 2, 5, 4, 2, 8)
    assert kv.dtype == torch.float16
    assert kv[1, 0].flatten(0, 1).data_ptr() == kv[1, 0].data_ptr()


@pytest.mark.parametrize(
    ("slots", "message"),
    [([24], r"slots must lie in \[-1, 24\)"), ([-2], r"slots must lie in"), ([0, 1], "key must")],
)
def test_store_refuses_slots(slots: list[int], message: str) -> None:
    """Catches a slot outside the pool; nothing may be written then."""
    kv = pool("token-major")
    before = kv.clone()
    rows = torch.ones(1, 2, 8)
    with pytest.raises(ValueError, match=message):
        store_kv(rows, rows, kv[0, 0], kv[0, 1], torch.tensor(slots))
    assert torch.equal(kv, before)


def test_store_refuses_other_arguments() -> None:
    """Catches silent conversion or broadcasting."""
    kv = pool("token-major")
    k_cache, v_cache = kv[0, 0], kv[0, 1]
    rows, slots = torch.ones(1, 2, 8), torch.tensor([3])
    with pytest.raises(TypeError, match="slots must be int64"):
        store_kv(rows, rows, k_cache, v_cache, slots.int())
    with pytest.raises(ValueError, match=r"slots must have shape \(num_rows,\)"):
        store_kv(rows, rows, k_cache, v_cache, slots[None])
    with pytest.raises(ValueError, match="value must have shape"):
        store_kv(rows, rows[:, :1], k_cache, v_cache, slots)
    with pytest.raises(TypeError, match=r"key is torch\.float64"):
        store_kv(rows.double(), rows, k_cache, v_cache, slots)
    with pytest.raises(ValueError, match="k_cache must have shape"):
        store_kv(rows, rows, kv[0], v_cache, slots)


@pytest.mark.parametrize(
    ("src", "dst", "num_tokens", "message"),
    [
        ([0, 1], [2], [1, 1], "equally long"),
        ([6], [0], [1], "src must lie"),
        ([-1], [0], [1], "src must lie"),
        ([0], [6], [1], "dst must lie"),
        ([0], [0], [1], "not be src"),
        ([0], [1], [5], "num_tokens must lie"),
    ],
)
def test_copy_refuses(src: list[int], dst: list[int], num_tokens: list[int], message: str) -> None:
    """Catches a bad pair found after others were copied."""
    kv = pool("token-major")
    before = kv.clone()
    with pytest.raises(ValueError, match=message):
        copy_blocks(kv, [2, *src], [3, *dst], [4, *num_tokens])
    assert torch.equal(kv, before)
    with pytest.raises(ValueError, match="kv must have shape"):
        copy_blocks(kv[0], [0], [1], [1])


def test_allocate_refuses() -> None:
    """Catches an empty pool and a dtype no implementation reads."""
    with pytest.raises(ValueError, match="must be positive"):
        allocate_kv(1, 0, 16, 2, 8, dtype=torch.float32, device="cpu")
    with pytest.raises(TypeError, match="dtype must be one of"):
        allocate_kv(1, 1, 16, 2, 8, dtype=torch.int16, device="cpu")
