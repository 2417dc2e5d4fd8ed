"""Tokens drawn from rows of logits, and their log-probabilities, by C kernels on a CPU.

Owns what crosses into `_native/draw.c`, `logprobs.c` and `mask.c`: addresses, shapes and scratch.
It knows no request and no stream of random numbers; where there is no library, whoever calls has a
way of their own.
"""

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from agentkv_kernels.native import NativeLibrary
from agentkv_kernels.scratch import Scratch

_BLOCK = 64
"""Tokens of a block; `BLOCK` and `SLACK` of the kernel."""
_P, _N = ctypes.c_void_p, ctypes.c_int64


class Choice(NamedTuple):
    """How a row's token is chosen."""

    number: float = 0.0
    """Where in the distribution, in [0, 1)."""
    temperature: float = 0.0
    """Divides the logits; 0 takes the greatest, and nothing else here matters."""
    top_k: int = 0
    """Tokens that stay, and those as likely as the last of them; 0 leaves all."""
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0


class Chosen(NamedTuple):
    """What was chosen from some rows."""

    tokens: Tensor
    """(num_rows,) int64; where the greatest logit is not finite, the token that has it."""
    greatest: Tensor
    """(num_rows,) float32, the greatest logit; NaN above all."""


class MostLikely(NamedTuple):
    """The most likely tokens of some rows, greatest first, of equals the lowest id first."""

    token_ids: Tensor
    """(num_rows, width) int64, 0 where the logit is -inf."""
    logits: Tensor
    """(num_rows, width) float32, filled up with -inf."""


class Drawing:
    """Calls the kernels; by one thread at a time."""

    def __init__(self, library: NativeLibrary) -> None:
        self._draw = library.function("draw", _P, _N, _N, _N, _P, _P, _P, _P, _N, _N)
        self._normalise = library.function("normalise", _P, _N, _N, _N, _P, _P, _N, _N)
        self._most_likely = library.function(
            "most_likely", _P, _N, _N, _N, _P, _N, _P, _P, _P, _N, _N
        )
        self._mask = library.function("mask", _P, _N, _N, _P, _P, _N, _N)
        self._scratch = Scratch()

    def mask(self, logits: Tensor, rows: Sequence[int], masks: Sequence[bytes]) -> None:
        """Makes the logits of tokens outside of sets -inf; NaN stays.

        Args:
            logits: As for `choose`; overwritten.
            rows: Rows that masks are for; a row may have several, and a token must be in all.
            masks: One for each of `rows`, at least vocab_size bits: bit i of byte b stands for
                token 8 * b + i.
        """
        address, num_rows, stride, vocab_size = _rows(logits)
        assert all(0 <= row < num_rows for row in rows), "rows of the logits"
        assert all(8 * len(mask) >= vocab_size for mask in masks), "a bit for each token"
        self._mask(
            *(address, stride, vocab_size),
            (_N * len(rows))(*rows),
            (ctypes.c_char_p * len(masks))(*masks),
            len(masks),
            torch.get_num_threads(),
        )

    def choose(self, logits: Tensor, choices: Sequence[Choice]) -> Chosen:
        """Chooses a token for each row: a function of that row and its choice alone.

        Args:
            logits: (num_rows, vocab_size), float32, on a CPU, its rows dense.
            choices: One for each row.
        """
        num_rows, _ = logits.shape
        assert num_rows == len(choices), "one choice for each row"
        fields = np.array(choices, np.float64)
        tokens = torch.empty(num_rows, dtype=torch.int64)
        greatest = torch.empty(num_rows)
        self._draw(
            *_rows(logits),
            fields.ctypes.data,
            tokens.data_ptr(),
            greatest.data_ptr(),
            *self._workers(logits),
        )
        return Chosen(tokens, greatest)

    def normalisers(self, logits: Tensor) -> Tensor:
        """Computes the logarithm of each row's sum of exponentials, (num_rows,) float32.

        Args:
            logits: As for `choose`. A row without a finite greatest logit gives NaN.
        """
        found = torch.empty(len(logits))
        self._normalise(*_rows(logits), found.data_ptr(), *self._workers(logits))
        return found

    def most_likely(self, logits: Tensor, counts: Sequence[int]) -> MostLikely:
        """Finds each row's most likely tokens.

        Args:
            logits: As for `choose`. A row without a finite greatest logit has no tokens.
            counts: How many tokens for each row, in [1, vocab_size].
        """
        assert len(logits) == len(counts), "one count for each row"
        wanted = np.array(counts, np.int64)
        width = max(counts)
        token_ids = torch.empty(len(logits), width, dtype=torch.int64)
        most = torch.empty(len(logits), width)
        self._most_likely(
            *_rows(logits),
            wanted.ctypes.data,
            width,
            token_ids.data_ptr(),
            most.data_ptr(),
            *self._workers(logits),
        )
        return MostLikely(token_ids, most)

    def _workers(self, logits: Tensor) -> tuple[int, int, int]:
        """Scratch, its bytes for each thread, and threads."""
        num_blocks = -(-logits.shape[1] // _BLOCK)
        num_bytes = 40 * (num_blocks + 1) * _BLOCK + 16 * num_blocks
        num_threads = max(1, min(torch.get_num_threads(), len(logits)))
        return self._scratch.at_least(num_threads * num_bytes), num_bytes, num_threads


def _rows(logits: Tensor) -> tuple[int, int, int, int]:
    """Address, rows, elements from row to row, and elements of a row."""
    assert logits.dtype == torch.float32, "logits in float32"
    assert logits.is_cpu, "logits on a CPU"
    num_rows, vocab_size = logits.shape
    assert 0 < vocab_size < 2**31, "a vocabulary"
    assert logits.stride(1) == 1 or vocab_size == 1, "rows are dense"
    return logits.data_ptr(), num_rows, logits.stride(0), vocab_size
