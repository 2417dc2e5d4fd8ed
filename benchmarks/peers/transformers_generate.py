"""transformers' `generate`: a `DynamicCache` per path, copied and repeated for its branches.

That is the way its documentation gives for sharing a prefix. Nodes of one parent are one batch,
decoded for as long as the longest of them; batches of a wave run one after the other, since a
batch takes one cache.
"""

import copy
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, DynamicCache, LogitsProcessor, LogitsProcessorList

from benchmarks.peers.protocol import (
    Job,
    Load,
    Loaded,
    Node,
    Outcome,
    peak_rss,
    reset_peak_rss,
    serve,
)

DTYPE = torch.float32
MAX_TOKENS = 100_000
"""Of a batch's KV, which is not shared: about 4.6 GB with the small model."""


class FirstToken(LogitsProcessor):
    """Notes when the first token's logits are there; changes nothing."""

    def __init__(self) -> None:
        self.at = 0.0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Returns the logits as they are."""
        self.at = self.at or time.perf_counter()
        return scores


@dataclass(slots=True)
class Path:
    """One node while it lives."""

    token_ids: list[int]
    cache: Any
    """KV of all tokens but at most the last."""


class TransformersGenerate:
    """One model."""

    def __init__(self, load: Load) -> None:
        torch.set_num_threads(load.num_threads)
        self._model: Any = AutoModelForCausalLM.from_pretrained(load.folder, dtype=DTYPE).eval()

    def loaded(self) -> Loaded:
        """Describes the engine."""
        return Loaded(
            f"{transformers.__version__} on torch {torch.__version__}",
            "safetensors in fp32, sdpa, the parent's DynamicCache copied and repeated per branch",
        )

    @torch.inference_mode()
    def run(self, job: Job) -> Outcome:
        """Runs a job wave by wave."""
        reset_peak_rss()
        paths: dict[int, Path] = {}
        first_tokens: list[float] = []
        seconds: list[float] = []
        last_uses = job.last_uses()
        for index, (is_measured, numbers) in enumerate(job.numbered()):
            begun = time.perf_counter()
            for _, group in groupby(numbers, key=lambda number: _head(job.nodes[number])):
                alike = list(group)
                grown, first = self._grow([job.nodes[number] for number in alike], paths)
                paths.update(zip(alike, grown, strict=True))
                if is_measured:
                    first_tokens += [first - begun for n in alike if job.nodes[n].decode]
            for number in [number for number in paths if last_uses[number] <= index]:
                del paths[number]
            if is_measured:
                seconds.append(time.perf_counter() - begun)
        num_generated = tuple(node.decode for node in job.nodes)
        return Outcome(tuple(seconds), tuple(first_tokens), num_generated, None, peak_rss())

    def _grow(self, nodes: Sequence[Node], paths: dict[int, Path]) -> tuple[list[Path], float]:
        """Decodes nodes that begin alike; returns their paths and when the first token came."""
        node, longest = nodes[0], max(node.decode for node in nodes)
        token_ids, cache = self._begin(node, paths)
        first = FirstToken()
        if len(nodes) * (len(token_ids) + longest) > MAX_TOKENS:
            raise MemoryError(f"repeating the cache {len(nodes)} times takes too much memory")
        if longest:
            cache.batch_repeat_interleave(len(nodes))
        else:  # a prefix: computed once, with one token that is dropped
            nodes = nodes[:1]
        inputs = torch.tensor([token_ids] * len(nodes))
        tokens = self._model.generate(
            inputs,
            attention_mask=torch.ones_like(inputs),
            past_key_values=cache,
            max_new_tokens=max(1, longest),
            min_new_tokens=max(1, longest),
            do_sample=True,
            top_k=0,
            pad_token_id=0,
            logits_processor=LogitsProcessorList([first]),
        )
        assert tokens.shape == (len(nodes), len(token_ids) + max(1, longest))
        return [
            _row(tokens[i], cache, i, len(token_ids) + node.decode) for i, node in enumerate(nodes)
        ], first.at

    def _begin(self, node: Node, paths: dict[int, Path]) -> tuple[list[int], Any]:
        """Makes a path's beginning with a cache that ends before its last token, or earlier."""
        if node.parent is None:
            return list(node.given), DynamicCache(config=self._model.config)
        parent = paths[node.parent]
        token_ids = parent.token_ids[: node.at] + list(node.given)
        cache = copy.deepcopy(parent.cache)
        kept = len(parent.token_ids[: node.at]) - (not node.given)
        if cache.get_seq_length() > kept:
            cache.crop(kept - cache.get_seq_length())  # takes what to remove, negative
        return token_ids, cache


def _head(node: Node) -> tuple[int | None, int | None, tuple[int, ...]]:
    return node.parent, node.at, node.given


def _row(tokens: torch.Tensor, cache: Any, row: int, length: int) -> Path:
    """Takes one row of a batch, cut where its node ends."""
    own = copy.copy(cache)
    own.layers = [copy.copy(layer) for layer in cache.layers]
    for layer in own.layers:
        layer.keys = layer.keys[row : row + 1, :, :length]
        layer.values = layer.values[row : row + 1, :, :length]
    return Path(tokens[:length].tolist(), own)


if __name__ == "__main__":
    serve(TransformersGenerate)
