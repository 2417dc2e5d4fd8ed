"""Proves, at load, that a model on shared blocks computes what it computes by itself.

One prefix in chunks, a fork inside a block, two branches that extend and decode in mixed steps,
all on random tokens in a small poisoned pool; then the same tokens through the model's own eager
attention. Families exist that accept our attention function and come out silently wrong; this is
what keeps them out. It knows nothing of the engine's pool.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from agentkv.core.batch import AdapterRows, Batch, BlockCopy
from agentkv.errors import UnsupportedModelError
from agentkv.model.hand_batch import BranchRows, Piece, batch_of
from agentkv.model.kv_cache import KVCache
from agentkv.model.lora import AdapterStep
from agentkv.model.model_runner import ModelRunner, TokenSampler
from agentkv.model.model_shape import ModelShape
from agentkv_kernels.ops import Implementation

_TOLERANCES = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 6e-2}
"""Largest difference of a logit, as a share of the logits' own range."""
_KV_TOLERANCES = {torch.int8: 8e-2, torch.float8_e4m3fn: 1.5e-1}
"""The same for an 8-bit pool, where rounding KV outweighs what the model rounds."""
_WEIGHT_TOLERANCES = {"bf16": 6e-2, "int8": 1.5e-1}
"""The same where rows are rounded before products: a last bit that differs may round a value to its
other neighbour, and layer after layer such steps add up to what rounding itself costs."""
_LONGEST_PREFIX = 96
"""A window that needs a longer prefix is not crossed: the check must stay quick."""
_NUM_NEW_TOKENS = 4
"""Tokens each branch adds to the prefix."""


@dataclass(frozen=True, slots=True)
class GoldenReport:
    """How far the branches were from the model's own attention."""

    error: float
    """Largest difference of a logit over the range of the logits."""
    tolerance: float
    num_rows: int
    """Rows compared."""


class _Head(NamedTuple):
    branch: int
    position: int
    logits: Tensor  # (vocab_size,) fp32


def check_model(
    model: PreTrainedModel,
    shape: ModelShape,
    sampler: TokenSampler,
    *,
    block_size: int,
    kv_dtype: torch.dtype | None = None,
    weights: str | None = None,
    implementation: Implementation | None = None,
    batch_invariant: bool = False,
    adapters: AdapterStep | None = None,
    adapter: str = "",
) -> GoldenReport:
    """Compares two forked branches with the model's own attention on each branch's tokens.

    Args:
        model: As described by `shape`; back on AgentKV's attention afterwards.
        shape: Of the model.
        sampler: The one that will serve; nothing is sampled here.
        block_size: The one that will serve.
        kv_dtype: As for `KVCache`.
        weights: What they were rounded to, `bf16` or `int8`; None where they are as loaded.
        implementation: Of the kernels, as for `ModelRunner`.
        batch_invariant: As for `ModelRunner`.
        adapters: Of the model, if it has any.
        adapter: The one to compute with, compared with the model as if it was merged into it.

    Raises:
        UnsupportedModelError: The logits differ by more than the dtype's tolerance; says by how
            much and what to do.
    """
    layout = _Layout.of(shape, block_size)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(shape.vocab_size, (2, layout.length), generator=generator)
    tokens[1, : layout.prefix] = tokens[0, : layout.prefix]
    kv = KVCache(shape, num_blocks=layout.num_blocks, block_size=block_size, dtype=kv_dtype)
    kv.poison(float("nan"))
    beside = adapters or AdapterStep()
    runner = ModelRunner(
        model,
        kv,
        sampler,
        implementation=implementation,
        batch_invariant=batch_invariant,
        adapters=beside,
    )
    heads = _run_branches(runner, layout, tokens.tolist(), adapter)
    ours = model.config._attn_implementation
    try:
        with beside.merged(adapter):
            expected = _own_logits(model, tokens.to(shape.device), first=layout.prefix - 1)
    finally:
        model.set_attn_implementation(ours)
    tolerance = max(
        _TOLERANCES.get(shape.dtype, 1e-3),
        _KV_TOLERANCES.get(kv.dtype, 0.0),
        _WEIGHT_TOLERANCES.get(weights or "", 0.0),
    )
    report = _compare(heads, expected, layout, tolerance)
    if not report.error <= report.tolerance:  # NaN must fail
        raise UnsupportedModelError(
            f"{shape.architecture} differs from its own attention when branches share blocks: "
            f"logits are off by {report.error:.2e} of their range (tolerance "
            f"{report.tolerance:.0e} for {shape.dtype}, KV in {kv.dtype}). Answers would be "
            "silently wrong, so it is not served. Load it in float32 to tell rounding from a "
            "fault, or use another model."
        )
    return report


@dataclass(frozen=True, slots=True)
class _Layout:
    """Blocks and positions of the two branches.

    prefix   [0, prefix)         blocks 0 ..., the last one partly filled
    first    [prefix, length)    goes on in the prefix's last block
    second   [floor, length)     in a copy of that block, where floor is its first position
    """

    block_size: int
    prefix: int

    @classmethod
    def of(cls, shape: ModelShape, block_size: int) -> "_Layout":
        """Places the fork inside a block, past every window that is near."""
        near = [window for window in shape.windows if window + block_size <= _LONGEST_PREFIX]
        start = max([block_size, *near])
        return cls(block_size, -(-start // block_size) * block_size + max(1, block_size // 2))

    @property
    def length(self) -> int:
        """Tokens of each branch."""
        return self.prefix + _NUM_NEW_TOKENS

    @property
    def floor(self) -> int:
        """First position of the block that the fork cuts; the fork itself if it cuts none."""
        return self.prefix // self.block_size * self.block_size

    @property
    def blocks_of_path(self) -> int:
        """Blocks of one branch alone."""
        return -(-self.length // self.block_size)

    @property
    def num_blocks(self) -> int:
        """Blocks of both branches together."""
        return 2 * self.blocks_of_path - self.floor // self.block_size

    def copies(self) -> tuple[BlockCopy, ...]:
        """Copies the cut block for the second branch."""
        if self.floor == self.prefix:
            return ()
        return (
            BlockCopy(self.floor // self.block_size, self.blocks_of_path, self.prefix - self.floor),
        )

    def prefix_path(self, end: int) -> tuple[Piece, ...]:
        """Path of the prefix while it is computed, up to `end`."""
        return (Piece(0, 0, end, tuple(range(-(-end // self.block_size)))),)

    def branch_path(self, branch: int, end: int) -> tuple[Piece, ...]:
        """Path of a branch, up to `end`; both share the piece [0, floor)."""
        cut = self.floor // self.block_size
        shared = (Piece(0, 0, self.floor, tuple(range(cut))),) if cut else ()
        if branch == 1:
            copied = range(self.blocks_of_path, self.num_blocks)
            return (*shared, Piece(2, self.floor, end, tuple(copied)))
        own = tuple(range(cut, self.blocks_of_path))
        tail = (Piece(0, self.floor, self.prefix, own[:1]),) if self.floor < self.prefix else ()
        return (*shared, *tail, Piece(1, self.prefix, end, own))


def _run_branches(
    runner: ModelRunner, layout: _Layout, tokens: Sequence[Sequence[int]], adapter: str
) -> list[_Head]:
    """Runs prefix and branches in four steps, keeping the logits of every compared row."""
    heads: list[_Head] = []
    middle = layout.prefix // 2
    for start, end in ((0, middle), (middle, layout.prefix)):
        rows = BranchRows(tuple(tokens[0][start:end]), start, layout.prefix_path(end))
        last = (end - start - 1,) if end == layout.prefix else ()
        batch = batch_of([rows], block_size=layout.block_size, heads=last)
        kept = runner.run(_with_adapter(batch, adapter)).heads
        heads += [_head(branch, end - 1, head) for branch in (0, 1) for head in kept]
    done = [layout.prefix, layout.prefix]
    for counts in ((3, 2), (1, 2)):  # two chunks of different length, then a decode beside a chunk
        places = [(b, done[b] + i) for b in (0, 1) for i in range(counts[b])]
        branches = [
            BranchRows(
                tuple(tokens[b][done[b] : done[b] + counts[b]]),
                done[b],
                layout.branch_path(b, done[b] + counts[b]),
            )
            for b in (0, 1)
        ]
        batch = batch_of(
            branches,
            block_size=layout.block_size,
            copies=layout.copies() if done[0] == layout.prefix else (),
            heads=range(len(places)),
        )
        kept = runner.run(_with_adapter(batch, adapter)).heads
        heads += [_head(*place, head) for place, head in zip(places, kept, strict=True)]
        done = [done[b] + counts[b] for b in (0, 1)]
    return heads


def _with_adapter(batch: Batch, adapter: str) -> Batch:
    """Gives all rows of a batch an adapter, if there is one."""
    return replace(batch, adapters=(AdapterRows(adapter, 0, batch.num_rows),) if adapter else ())


def _head(branch: int, position: int, logits: object) -> _Head:
    assert isinstance(logits, Tensor)
    return _Head(branch, position, logits)


def _own_logits(model: PreTrainedModel, tokens: Tensor, *, first: int) -> Tensor:
    """Computes both branches from scratch with the model's own eager attention.

    Returns:
        Logits of the positions from `first` on, (2, length - first, vocab_size) fp32.
    """
    model.set_attn_implementation("eager")
    rows = torch.arange(first, tokens.shape[1], device=tokens.device)
    with torch.inference_mode():
        # Not model(...): that would compile a compiled model once more.
        logits: Tensor = model.forward(tokens, use_cache=False, logits_to_keep=rows).logits
    return logits.float()


def _compare(
    heads: Sequence[_Head], expected: Tensor, layout: _Layout, tolerance: float
) -> GoldenReport:
    first = layout.prefix - 1
    ours = torch.stack([head.logits for head in heads])
    theirs = torch.stack([expected[head.branch, head.position - first] for head in heads])
    spread = float(theirs.max() - theirs.min())
    error = float((ours - theirs).abs().max()) / max(spread, torch.finfo(torch.float32).tiny)
    return GoldenReport(error=error, tolerance=tolerance, num_rows=len(heads))
