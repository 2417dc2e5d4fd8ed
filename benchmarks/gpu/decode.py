"""Decoding end to end: a Llama with random weights, many branches below one long prefix.

The prefix's KV is random too: what is measured is the step, through the model runner that serves,
tokens read back each time. With graphs and without.
"""

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from agentkv.core.batch import Batch, Sample, Stream
from agentkv.model.attention import use_agentkv_attention
from agentkv.model.hand_batch import BranchRows, Piece, batch_of
from agentkv.model.kv_cache import KVCache
from agentkv.model.model_runner import ModelRunner
from agentkv.model.model_shape import describe_model
from agentkv.model.sampler import Sampler
from agentkv.sampling_params import SamplingParams
from agentkv_kernels.ops import Implementation
from benchmarks.gpu.workloads import BLOCK_SIZE


class Decoding(NamedTuple):
    """What is decoded."""

    name: str
    sizes: dict[str, int]
    """Of the model, as its configuration names them."""
    branches: int
    prefix: int
    """Tokens, a multiple of the block size."""
    steps: int


LLAMA_1B = {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 128256,
}
LLAMA_8B = LLAMA_1B | {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "head_dim": 128,
}
TINY = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 97,
}
DECODINGS = (
    Decoding("decode 1B, 64 branches, 16k", LLAMA_1B, 64, 16384, 40),
    Decoding("decode 8B, 64 branches, 16k", LLAMA_8B, 64, 16384, 40),
)
REHEARSAL = (Decoding("decode tiny", TINY, 2, 32, 3),)


class Bench:
    """One model and its pool, ready to decode."""

    def __init__(self, decoding: Decoding, device: torch.device, how: Implementation) -> None:
        """Builds the model on the device, with random weights, and fills its pool."""
        self.decoding = decoding
        options: dict[str, Any] = {**decoding.sizes, "dtype": "bfloat16"}
        config = LlamaConfig(**options, max_position_embeddings=decoding.prefix + 4096)
        with torch.device(device):
            before = torch.get_default_dtype()
            torch.set_default_dtype(torch.bfloat16)
            model: Any = LlamaForCausalLM(config)
            torch.set_default_dtype(before)
        model.eval()
        use_agentkv_attention(model)
        own = -(-(2 * decoding.steps + 8) // BLOCK_SIZE)
        self._own_blocks = own
        self._prefix_blocks = decoding.prefix // BLOCK_SIZE
        num_blocks = self._prefix_blocks + own * decoding.branches
        kv = KVCache(describe_model(model), num_blocks=num_blocks, block_size=BLOCK_SIZE)
        kv.poison(0.01)
        self.runner = ModelRunner(model, kv, Sampler(), implementation=how)
        self._tokens = [1] * decoding.branches
        self._length = decoding.prefix

    def step(self) -> None:
        """Decodes one token of each branch, and reads them back."""
        result = self.runner.run(self._batch())
        self._tokens = [sampled.token for sampled in result.samples]
        self._length += 1

    def measure(self) -> list[float]:
        """Decodes; returns the milliseconds of each step after a few to warm up."""
        times = []
        for number in range(self.decoding.steps + 3):
            begin = time.perf_counter()
            self.step()
            if number >= 3:
                times.append((time.perf_counter() - begin) * 1e3)
        return times

    def graphs(self) -> Callable[[], None] | None:
        """Returns what captures graphs for the runner, or None where it has none."""
        capture: Any = getattr(self.runner, "capture_graphs", None)
        if capture is None:
            return None
        return lambda: capture(self.decoding.branches, print)

    def _batch(self) -> Batch:
        decoding, own = self.decoding, self._own_blocks
        shared = Piece(0, 0, decoding.prefix, tuple(range(self._prefix_blocks)))
        rows = []
        for branch, token in enumerate(self._tokens):
            first = self._prefix_blocks + branch * own
            tail = Piece(
                1 + branch, decoding.prefix, self._length + 1, tuple(range(first, first + own))
            )
            rows.append(BranchRows((token,), self._length, (shared, tail)))
        params = SamplingParams()
        samples = [
            Sample(row, None, params, Stream(0, row), self._length + 1)
            for row in range(decoding.branches)
        ]
        return batch_of(rows, block_size=BLOCK_SIZE, samples=samples)
