"""llama.cpp through its Python binding: branches are sequences of one unified KV, forked by copy.

`llama_memory_seq_cp` forks at any token without copying KV. The logits at a node's end are kept,
so branches of it sample their first token at once. Rows are counted as they are handed over.
"""

import ctypes
import time
from dataclasses import dataclass

import llama_cpp
import numpy as np
from numpy.typing import NDArray

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

MAX_SEQUENCES = 256
NUM_CELLS = 16384
"""Tokens of KV."""
LARGEST_BATCH = 2048
SEED = 1
TINY = 1e-30
"""Keeps the logarithm of a zero away."""


@dataclass(slots=True)
class Path:
    """One node while it lives."""

    sequence: int
    length: int
    """Tokens in KV."""
    pending: list[int]
    """Tokens that follow and are not in KV yet."""
    logits: NDArray[np.float32] | None = None
    """After the last token in KV, where known."""
    num_sampled: int = 0


@dataclass(slots=True)
class Row:
    """One token to compute."""

    path: Path
    token_id: int
    wants_logits: bool


@llama_cpp.llama_log_callback
def _quiet(level: int, text: bytes, user_data: ctypes.c_void_p) -> None:
    """Drops what llama.cpp says while it loads."""


class LlamaCpp:
    """One context of llama.cpp."""

    def __init__(self, load: Load) -> None:
        llama_cpp.llama_log_set(_quiet, None)
        llama_cpp.llama_backend_init()
        model = llama_cpp.llama_model_default_params()
        self._model = llama_cpp.llama_model_load_from_file(load.gguf.encode(), model)
        vocabulary = llama_cpp.llama_model_get_vocab(self._model)
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(vocabulary)
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = NUM_CELLS
        params.n_batch = LARGEST_BATCH
        params.n_seq_max = MAX_SEQUENCES
        params.kv_unified = True
        params.n_threads = params.n_threads_batch = load.num_threads
        self._context = llama_cpp.llama_init_from_model(self._model, params)
        self._memory = llama_cpp.llama_get_memory(self._context)
        self._batch = llama_cpp.llama_batch_init(LARGEST_BATCH, 0, 1)
        self._random = np.random.default_rng(SEED)
        self._free = list(range(MAX_SEQUENCES))
        self._rows = 0

    def loaded(self) -> Loaded:
        """Describes the engine."""
        return Loaded(
            f"binding {llama_cpp.__version__}",
            "GGUF, unified KV in fp16, llama_memory_seq_cp per fork, logits of shared ends kept, "
            "flash attention as it chooses, built here for this processor",
        )

    def run(self, job: Job) -> Outcome:
        """Runs a job on an empty KV."""
        llama_cpp.llama_memory_clear(self._memory, True)
        self._free = list(range(MAX_SEQUENCES))
        paths: dict[int, Path] = {}
        num_generated: list[int] = []
        first_tokens: list[float] = []
        seconds: list[float] = []
        last_uses = job.last_uses()
        rows = self._rows
        reset_peak_rss()
        for index, (is_measured, numbers) in enumerate(job.numbered()):
            begun = time.perf_counter()
            nodes = [job.nodes[number] for number in numbers]
            self._settle_parents(nodes, paths)
            for number, node in zip(numbers, nodes, strict=True):
                paths[number] = self._fork(node, paths)
            firsts = self._decode([paths[number] for number in numbers], nodes)
            num_generated += [paths[number].num_sampled for number in numbers]
            for number in [n for n in paths if last_uses[n] <= index]:
                self._release(paths.pop(number))
            if is_measured:
                seconds.append(time.perf_counter() - begun)
                first_tokens += [at - begun for at in firsts]
            else:
                rows = self._rows
        return Outcome(
            tuple(seconds),
            tuple(first_tokens),
            tuple(num_generated),
            self._rows - rows,
            peak_rss(),
        )

    def _settle_parents(self, nodes: list[Node], paths: dict[int, Path]) -> None:
        """Computes the last token of each parent once, for all who begin behind it."""
        parents = {node.parent: paths[node.parent] for node in nodes
                   if node.parent is not None and node.at is None}  # fmt: skip
        self._compute([path for path in parents.values() if path.pending])

    def _fork(self, node: Node, paths: dict[int, Path]) -> Path:
        sequence = self._free.pop()
        if node.parent is None:
            return Path(sequence, 0, list(node.given))
        parent = paths[node.parent]
        end = parent.length if node.at is None else node.at
        llama_cpp.llama_memory_seq_cp(self._memory, parent.sequence, sequence, 0, end)
        logits = parent.logits if end == parent.length else None
        return Path(sequence, end, list(node.given), logits)

    def _release(self, path: Path) -> None:
        llama_cpp.llama_memory_seq_rm(self._memory, path.sequence, -1, -1)
        self._free.append(path.sequence)

    def _decode(self, paths: list[Path], nodes: list[Node]) -> list[float]:
        """Computes what was given, then a token of each path a step; returns when the first came.

        A path that is to go on from inside another one without new tokens cannot be run: every
        job gives such a node at least one token.
        """
        self._compute([path for path in paths if path.pending])
        left = [node.decode for node in nodes]
        firsts: list[float] = []
        while active := [i for i, count in enumerate(left) if count]:
            for i, token_id in zip(active, self._sample([paths[i] for i in active]), strict=True):
                paths[i].pending.append(token_id)
                paths[i].num_sampled += 1
                left[i] -= 1
            if not firsts:
                firsts = [time.perf_counter()] * len(active)
            self._compute([paths[i] for i in active if left[i]])
        return firsts

    def _sample(self, paths: list[Path]) -> list[int]:
        """Draws from softmax at temperature 1: the largest of logit minus log of an exponential."""
        logits = np.stack([path.logits for path in paths if path.logits is not None])
        noise = self._random.standard_exponential(logits.shape, dtype=np.float32)
        return [int(i) for i in np.argmax(logits - np.log(noise + TINY), axis=1)]

    def _compute(self, paths: list[Path]) -> None:
        """Runs all pending tokens and keeps the logits after the last of each path."""
        rows = [
            Row(path, token_id, offset == len(path.pending) - 1)
            for path in paths
            for offset, token_id in enumerate(path.pending)
        ]
        for path in paths:
            path.pending.clear()
        for start in range(0, len(rows), LARGEST_BATCH):
            self._run(rows[start : start + LARGEST_BATCH])

    def _run(self, rows: list[Row]) -> None:
        batch = self._batch
        batch.n_tokens = len(rows)
        for i, row in enumerate(rows):
            batch.token[i] = row.token_id
            batch.pos[i] = row.path.length
            batch.n_seq_id[i] = 1
            batch.seq_id[i][0] = row.path.sequence
            batch.logits[i] = row.wants_logits
            row.path.length += 1
        if code := llama_cpp.llama_decode(self._context, batch):
            raise RuntimeError(f"llama_decode returned {code}")
        self._rows += len(rows)
        for i, row in enumerate(rows):
            if row.wants_logits:
                pointer = llama_cpp.llama_get_logits_ith(self._context, i)
                row.path.logits = np.ctypeslib.as_array(
                    ctypes.cast(pointer, ctypes.POINTER(ctypes.c_float)), (self._vocab_size,)
                ).copy()


if __name__ == "__main__":
    serve(LlamaCpp)
