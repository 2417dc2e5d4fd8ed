"""Masks of allowed tokens, made beside the model's work.

It owns a thread that starts with a step and is done, as a rule, long before the step's logits
are. It knows matchers and bits, no grammar and no logits.
"""

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
from llguidance import LLExecutor

from agentkv.engine.grammar import GrammarMatcher


class MaskMaker:
    """Makes the masks of one step at a time, all of a step together.

    The library releases Python's lock meanwhile, and spreads a step's masks over threads of its
    own. A matcher that runs into its limits is out of this and every later step; it disturbs no
    other.
    """

    def __init__(self) -> None:
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="agentkv-masks")
        self._executor: LLExecutor | None = None

    def begin(self, matchers: Sequence[GrammarMatcher]) -> None:
        """Starts to make the masks that these matchers' `bits` will wait for."""
        if not matchers:
            return
        rows: list[Future[bytes]] = [Future() for _ in matchers]
        for matcher, row in zip(matchers, rows, strict=True):
            matcher.begin(row)
        self._worker.submit(self._make, matchers, rows)

    def _make(self, matchers: Sequence[GrammarMatcher], rows: Sequence["Future[bytes]"]) -> None:
        try:
            masks = self._masks(matchers)
        except BaseException as error:  # whoever waits for a row has to hear of it
            for row in rows:
                row.set_exception(error)
            return
        for row, mask in zip(rows, masks, strict=True):
            row.set_result(mask)

    def _masks(self, matchers: Sequence[GrammarMatcher]) -> list[bytes]:
        num_words = matchers[0].grammar.num_words
        masks = np.zeros((len(matchers), num_words), dtype=np.uint32)
        alone: list[int] = []
        asked = []
        for number, matcher in enumerate(matchers):
            state = matcher.open()
            if state is None:
                alone.append(number)
            else:
                asked.append((state, number))
        if asked:
            self._executor = self._executor or LLExecutor()
            self._executor.unsafe_compute_mask_ptr(
                asked, masks.ctypes.data, 4 * num_words, len(matchers)
            )
        found = [mask.tobytes() for mask in masks]
        for number in alone:
            row = bytearray(found[number])
            matchers[number].mask_alone(row)
            found[number] = bytes(row)
        for _, number in asked:
            matchers[number].close()
        return found
