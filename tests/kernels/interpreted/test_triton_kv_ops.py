"""Storing, copying and 8-bit KV by the Triton kernels, in the interpreter; and what they refuse."""

import math
import random
from typing import Any

import pytest
import torch
from kernel_trees import Inputs, Tree, decode_tree, make_inputs, norm_error, random_tree

from agentkv_kernels import (
    AttentionPlan,
    KVRun,
    KVScales,
    WorkBuffers,
    allocate_kv,
    copy_blocks,
    store_kv,
    tree_attention,
    work_list_attention,
    work_options,
)
from agentkv_kernels.quantise import dequantise, quantise

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def attend(tree: Tree, poison: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    inputs = make_inputs(tree, num_kv_heads=1, poison=poison, dtype=dtype)
    return tree_attention(
        inputs.query,
        inputs.k_cache,
        inputs.v_cache,
        tree.plan(),
        scale=inputs.scale,
        implementation="triton",
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_major", [False, True])
def test_store_equals_plain_indexing(dtype: torch.dtype, head_major: bool) -> None:
    """Catches a slot, stride or head mixed up, and -1 written to the last slot."""
    shapes = [allocate_kv(2, 6, 4, 2, 24, dtype=dtype, device="cpu") for _ in range(2)]
    mine, other = (kv.transpose(3, 4).contiguous().transpose(3, 4) if head_major else kv
                   for kv in shapes)  # fmt: skip
    key = torch.randn(2, 5, 24).transpose(0, 1).to(dtype)
    value = torch.randn(5, 2, 24).to(dtype)
    slots = torch.tensor([7, -1, 23, 0, -1])
    store_kv(key, value, mine[1, 0], mine[1, 1], slots, implementation="triton")
    store_kv(key, value, other[1, 0], other[1, 1], slots, implementation="cpu")
    assert torch.equal(mine, other)


@pytest.mark.parametrize("dtype", DTYPES)
def test_copies_equal_those_one_by_one(dtype: torch.dtype) -> None:
    """Catches a hazard inside one launch: chains, reuse and overwriting in the order given."""
    rng = random.Random(1)
    for _ in range(4):
        mine = torch.randn(2, 2, 9, 4, 2, 24).to(dtype)
        other = mine.clone()
        pairs = [rng.sample(range(9), 2) for _ in range(7)]
        counts = [rng.randint(0, 4) for _ in pairs]
        src, dst = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
        copy_blocks(mine, src, dst, counts, implementation="triton")
        copy_blocks(other, src, dst, counts, implementation="cpu")
        assert torch.equal(mine, other)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_eight_bits(dtype: torch.dtype) -> None:
    """Catches a factor applied to the wrong token or head, in storing, copying or attending."""
    tree = random_tree(6, num_rows=5)
    inputs = make_inputs(tree, group=2, poison=0.0)
    num_blocks = tree.num_blocks
    kv = allocate_kv(1, num_blocks + 1, 4, 2, 16, dtype=dtype, device="cpu")
    factors = allocate_kv(1, num_blocks + 1, 4, 2, 1, dtype=torch.float32, device="cpu")
    factors.fill_(math.nan)
    scales = KVScales(factors[0, 0, ..., 0], factors[0, 1, ..., 0])
    key, value = (cache.flatten(0, 1) for cache in (inputs.k_cache, inputs.v_cache))
    seen = sorted({slot for row in range(len(tree.kv_lens)) for slot in tree.visible_slots(row)})
    slots = torch.full((len(key),), -1)
    slots[seen] = torch.tensor(seen)
    store_kv(key, value, kv[0, 0], kv[0, 1], slots, scales=scales, implementation="triton")
    stored, factor = quantise(key[seen], dtype)
    assert torch.equal(scales.k.flatten(0, 1)[seen], factor)
    # The interpreter loses the carry where an 8-bit float is rounded up to a power of two.
    equal = kv[0, 0].flatten(0, 1)[seen].float() == stored.float()
    assert float(equal.float().mean()) > (0.999 if dtype == torch.int8 else 0.95)
    # The last block takes over block 0, numbers and factors.
    for pool in (kv, factors):
        copy_blocks(pool, [0], [num_blocks], [4], implementation="triton")
    swap = {0: num_blocks}
    runs = tuple(
        run._replace(block_ids=tuple(swap.get(b, b) for b in run.block_ids)) for run in tree.runs
    )
    plan = AttentionPlan.build(runs, tree.kv_lens, block_size=4)
    out = tree_attention(
        inputs.query,
        kv[0, 0],
        kv[0, 1],
        plan,
        scale=inputs.scale,
        scales=scales,
        implementation="triton",
    )
    expected = tree_attention(
        inputs.query,
        dequantise(kv[0, 0], scales.k, torch.float32),
        dequantise(kv[0, 1], scales.v, torch.float32),
        plan,
        scale=inputs.scale,
        implementation="reference",
    )
    assert norm_error(out, expected) < 1e-5


@pytest.mark.parametrize("dtype", DTYPES)
def test_case_079_unwritten_slots_do_not_poison(dtype: torch.dtype) -> None:
    """Catches 0 x NaN: whatever unwritten slots hold, the bits are those of a zeroed pool."""
    runs = (
        KVRun(0, 17, (3, 1), (0,)),
        KVRun(0, 3, (6,), (1,)),
        KVRun(0, 9, (0,), range(2, 4)),
        KVRun(9, 12, (5,), (2,)),
        KVRun(9, 20, (2, 4), (3,)),
        KVRun(0, 30, (7, 8), range(4, 24)),
    )
    tree = Tree(16, 13, runs, (17, 3, 12, 20, *range(11, 31)))
    expected = attend(tree, 0.0, dtype)
    assert expected.isfinite().all()
    for poison in (math.nan, math.inf, 1e30 if dtype != torch.float16 else 6e4):
        assert torch.equal(attend(tree, poison, dtype), expected)


def test_case_080_padding_rows_write_nothing() -> None:
    """Catches id -1 wrapping to the last slot: the first and last block are live and full."""
    kv = torch.randn(1, 2, 8, 4, 2, 16)
    before = kv.clone()
    key = torch.randn(8, 2, 16)
    slots = torch.tensor([4, 5, 6, 7, 8, -1, -1, -1])
    store_kv(key, key, kv[0, 0], kv[0, 1], slots, implementation="triton")
    assert torch.equal(kv[:, :, [0, 7]], before[:, :, [0, 7]])
    assert torch.equal(kv[0, 1, 1], key[:4])


def test_case_083_stale_ids_past_the_end_are_not_read() -> None:
    """Catches leftovers of an earlier, longer block table being followed."""
    outs = []
    for stale in ((0, 7, 4, 6), (8, 9, 10, 11), (2**31 - 1,) * 4):
        other = KVRun(0, 90, (1, 3, 8, 9, 10, 11), (1,))
        tree = Tree(16, 12, (KVRun(0, 17, (5, 2, *stale), (0,)), other), (17, 90))
        outs.append(attend(tree, math.nan))
    assert outs[0].isfinite().all()
    assert torch.equal(outs[1], outs[0])
    assert torch.equal(outs[2], outs[0])


def good() -> dict[str, Any]:
    tree = decode_tree(2, 20, 3)
    inputs = make_inputs(tree, num_kv_heads=1, poison=0.0)
    return {
        "query": inputs.query,
        "k_cache": inputs.k_cache,
        "v_cache": inputs.v_cache,
        "plan": tree.plan(),
        "scale": 1.0,
        "implementation": "triton",
    }


def test_attention_names_what_it_refuses() -> None:
    """Catches an address computed from a stride, dtype or block id that does not fit."""
    fits = good()
    tree_attention(**fits)
    narrow = fits["k_cache"][:1]
    strided = torch.zeros(*fits["k_cache"].shape, 2)[..., 0]
    cases: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"query": fits["query"].repeat(1, 1, 2)[..., ::2]}, ValueError, "query must have stride"),
        ({"k_cache": strided}, ValueError, "k_cache must have stride 1"),
        ({"v_cache": strided}, ValueError, "v_cache must have stride 1"),
        ({"k_cache": narrow, "v_cache": narrow}, ValueError, "plan reads block"),
        ({"k_cache": fits["k_cache"].to(torch.int8), "v_cache": fits["v_cache"].to(torch.int8)},
         ValueError, "scales must be given"),
        ({"k_cache": fits["k_cache"].to("meta")}, ValueError, "k_cache is on meta"),
        ({"sinks": torch.ones(3, device="meta")}, ValueError, "sinks is on meta"),
    ]  # fmt: skip
    for changed, error, message in cases:
        with pytest.raises(error, match=message):
            tree_attention(**{**fits, **changed})
    doubles = {name: fits[name].double() for name in ("query", "k_cache", "v_cache")}
    with pytest.raises(TypeError, match="query must be one of"):
        tree_attention(**{**fits, **doubles})


def test_store_names_what_it_refuses() -> None:
    """Catches a write that leaves the pool."""
    cache = torch.zeros(2, 4, 1, 16)
    new = torch.ones(1, 1, 16)
    for slot in (8, -2):
        with pytest.raises(ValueError, match="slots must lie in"):
            store_kv(new, new, cache, cache, torch.tensor([slot]), implementation="triton")
    bad = torch.ones(1, 1, 32)[..., ::2]
    with pytest.raises(ValueError, match="value must have stride 1"):
        store_kv(new, bad, cache, cache, torch.tensor([0]), implementation="triton")
    with pytest.raises(ValueError, match="key must have stride 1"):
        store_kv(bad, new, cache, cache, torch.tensor([0]), implementation="triton")
    with pytest.raises(ValueError, match="slots is on meta"):
        store_kv(new, new, cache, cache, torch.zeros(1, dtype=torch.int64, device="meta"))


def test_a_kept_list_must_fit_the_tensors() -> None:
    """Catches a list made for other heads, whose partials would be read with wrong strides."""
    fits = good()
    tensors = (fits["query"], fits["k_cache"], fits["v_cache"])
    options = work_options(*tensors)
    buffers = WorkBuffers.of(fits["plan"], options, torch.device("cpu"))
    expected = tree_attention(**fits)
    assert torch.equal(work_list_attention(*tensors, buffers, scale=1.0), expected)
    wider = Inputs(fits["query"].repeat(1, 2, 1), *tensors[1:], 1.0)
    with pytest.raises(ValueError, match="buffers are for sizes"):
        work_list_attention(wider.query, wider.k_cache, wider.v_cache, buffers, scale=1.0)
