"""Correct first: the kernels against the specification, on this device, before anything is timed.

Random trees in a pool that is NaN wherever nothing was written, in every dtype, each called plainly
and replayed as a graph whose outputs were made NaN in between.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from agentkv_kernels import KVScales, WorkBuffers, allocate_kv, store_kv, work_options
from agentkv_kernels._triton.attention import attend
from agentkv_kernels._triton.tree_attention import Score
from agentkv_kernels.kv_ops import copy_blocks
from agentkv_kernels.quantise import dequantise
from agentkv_kernels.reference import tree_attention
from benchmarks.gpu.workloads import BLOCK_SIZE, Heads, Layout, random_layout, unwritten

BOUNDS = {torch.bfloat16: 8e-3, torch.float16: 1e-3, torch.float32: 1e-5}
VARIANTS = (
    (Heads(8, 2, 128), torch.bfloat16),
    (Heads(14, 2, 64), torch.bfloat16),
    (Heads(8, 2, 128), torch.float16),
    (Heads(6, 6, 80), torch.bfloat16),
    (Heads(3, 1, 64), torch.float32),
    (Heads(16, 1, 256), torch.bfloat16),
)
"""Few, since each compiles its kernels first."""
NUM_TREES = 40


class Case(NamedTuple):
    """One tree with its tensors."""

    layout: Layout
    query: Tensor
    kv: Tensor
    """(1, 2, num_blocks, block_size, num_kv_heads, head_dim)"""
    scales: KVScales | None


class Unequal(Exception):
    """The kernels say something else than the specification."""


def make_case(seed: int, device: torch.device, *, tiny: bool, eight_bits: bool) -> Case:
    """Makes a random tree, with heads, dtype and size by its number."""
    heads, dtype = VARIANTS[0 if eight_bits else seed % len(VARIANTS)]
    heads = Heads(4, 2, 16) if tiny else heads
    num_rows = 1 + seed % (4 if tiny else 40)
    layout = random_layout(seed, num_rows=num_rows, max_tokens=40 if tiny else 700)
    cache_dtype = torch.float8_e4m3fn if eight_bits and not tiny else (
        torch.int8 if eight_bits else dtype)  # fmt: skip
    sizes = (1, layout.num_blocks, BLOCK_SIZE, heads.kv)
    kv = allocate_kv(*sizes, heads.dim, dtype=cache_dtype, device=device)
    scales = None
    if eight_bits:
        factors = allocate_kv(*sizes, 1, dtype=torch.float32, device=device)
        scales = KVScales(factors[0, 0, ..., 0], factors[0, 1, ..., 0])
    generator = torch.Generator().manual_seed(seed)

    def random(rows: int, num_heads: int) -> Tensor:
        numbers = torch.randn((rows, num_heads, heads.dim), generator=generator)
        return numbers.to(device, dtype)

    free = torch.from_numpy(unwritten(layout)).to(device)
    slots = torch.arange(len(free), device=device)
    key, value = random(len(free), heads.kv), random(len(free), heads.kv)
    slots = torch.where(free, -1, slots)
    if not eight_bits:
        kv.fill_(math.nan)
    how: Any = "triton"
    store_kv(key, value, kv[0, 0], kv[0, 1], slots, scales=scales, implementation=how)
    return Case(layout, random(num_rows, heads.query), kv, scales)


def check_case(case: Case, *, window: int | None, invariant: bool) -> float:
    """Compares one case, called and replayed; returns the relative error in the norm.

    Raises:
        Unequal: The error is more than rounding.
    """
    query, kv = case.query, case.kv[0]
    options = work_options(query, kv[0], kv[1], window=window, batch_invariant=invariant)
    buffers = WorkBuffers.of(case.layout.plan, options, query.device)
    score = Score(query.shape[2] ** -0.5, None, None)
    out = torch.full_like(query, math.nan)

    def call() -> Tensor:
        return attend(query, kv[0], kv[1], buffers, score, case.scales, out=out)

    key, value = kv[0], kv[1]
    if case.scales is not None:
        key = dequantise(key, case.scales.k, torch.float64)
        value = dequantise(value, case.scales.v, torch.float64)
    expected, _ = tree_attention(
        query.double(), key.double(), value.double(), case.layout.plan, scale=score.scale,
        window=window,
    )  # fmt: skip
    worst, bound = 0.0, BOUNDS[query.dtype]
    for graphed in (False, True):  # in this order: what is captured must be compiled before
        got = replayed(call, out)() if graphed else call()
        error = float((got.double() - expected).norm() / expected.norm())
        if not error < bound:  # NaN must fail
            raise Unequal(f"error {error:.2e}, bound {bound:.0e}: {case.query.shape} {query.dtype}")
        worst = max(worst, error)
    return worst


def replayed(call: Callable[[], Tensor], out: Tensor) -> Callable[[], Tensor]:
    """The same call as a graph, its output NaN beforehand; itself on a CPU."""
    if not out.is_cuda:
        return call
    cuda: Any = torch.cuda
    graph = cuda.CUDAGraph()
    with cuda.graph(graph):
        call()

    def run() -> Tensor:
        out.fill_(math.nan)
        graph.replay()
        return out

    return run


def check_copies(device: torch.device) -> None:
    """Compares block copies with those of plain indexing, a chain among them.

    Raises:
        Unequal: A slot differs.
    """
    kv = torch.randn((3, 2, 12, BLOCK_SIZE, 2, 64), device=device).to(torch.bfloat16)
    expected = kv.clone()
    src, dst, counts = [0, 1, 2, 7], [4, 5, 7, 9], [16, 3, 9, 16]
    copy_blocks(kv, src, dst, counts, implementation="triton")
    for source, target, count in zip(src, dst, counts, strict=True):
        expected[:, :, target, :count] = expected[:, :, source, :count]
    if not torch.equal(kv, expected):
        raise Unequal("copied blocks differ")


def check_all(device: torch.device, *, tiny: bool) -> float:
    """Checks 40 trees (3 in a rehearsal), each mode at least once; returns the worst error."""
    check_copies(device)
    worst = 0.0
    for seed in range(3 if tiny else NUM_TREES):
        case = make_case(seed, device, tiny=tiny, eight_bits=seed % 9 == 2)
        window = 50 if seed % 12 == 6 else None  # the first variant: one more compilation
        worst = max(worst, check_case(case, window=window, invariant=seed % 4 == 1))
    return worst
