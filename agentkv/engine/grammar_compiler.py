"""Compiles constraints for one model, each once, within limits.

It owns the cache, the limits and the threads that compile: neither the event loop nor the engine
waits for a schema. A grammar that is accepted has made its first mask.
"""

import asyncio
import json
from collections import OrderedDict
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple, dataclass
from functools import cached_property
from threading import Lock

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from agentkv.constraint import Constraint, rejected
from agentkv.engine.grammar import Grammar, first_line
from agentkv.engine.grammar_source import grammar_source
from agentkv.engine.tokenizer import Tokenizer
from agentkv.engine.tool_format import ToolFormat
from agentkv.errors import InvalidRequest, Reason

_FIELDS = {
    "JsonSchema": "json_schema",
    "Regex": "regex",
    "Lark": "grammar",
    "Choices": "choices",
    "Tools": "tools",
}


@dataclass(frozen=True, slots=True)
class GrammarLimits:
    """What constraints may cost."""

    max_characters: int = 262_144
    """Characters of one constraint."""
    timeout: float = 5.0
    """Seconds until a caller is told that its constraint is too large."""
    max_entries: int = 256
    """Grammars kept for the next caller."""
    max_cached_characters: int = 4_194_304
    """Characters of the constraints that are kept."""
    num_threads: int = 2
    """Constraints compiled at the same time."""
    max_lexer_states: int = 20_000
    """States of one matcher's lexer, of one to two kilobytes each."""


class GrammarCompiler:
    """Grammars of one model, most recently used last; may be used on any thread.

    What it keeps is bounded by `GrammarLimits`. A refused constraint is not kept.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        vocab_size: int,
        end_token_ids: Iterable[int],
        limits: GrammarLimits | None = None,
    ) -> None:
        self.tool_format = ToolFormat.of_template(tokenizer.chat_template)
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._end_token_ids = sorted(end_token_ids)
        self._limits = limits or GrammarLimits()
        self._kept: OrderedDict[Constraint, Grammar] = OrderedDict()
        self._lock = Lock()
        self._num_characters = 0
        self._workers = ThreadPoolExecutor(
            self._limits.num_threads, thread_name_prefix="agentkv-grammars"
        )

    def __len__(self) -> int:
        return len(self._kept)

    async def compile_soon(self, constraint: Constraint) -> Grammar:
        """Compiles on a thread of its own; otherwise as `compile`.

        Raises:
            InvalidRequest: It also took longer than the limit. What was begun goes on until the
                library's own limits end it, and takes one of the threads meanwhile.
        """
        if (known := self._find(constraint)) is not None:
            return known
        loop = asyncio.get_running_loop()
        work = loop.run_in_executor(self._workers, self.compile, constraint)
        try:
            return await asyncio.wait_for(work, self._limits.timeout)
        except TimeoutError:
            raise rejected(
                _field(constraint), f"took longer than {self._limits.timeout:g} s to compile"
            ) from None

    def compile(self, constraint: Constraint) -> Grammar:
        """Finds or makes the grammar of a constraint.

        Raises:
            InvalidRequest: It is not well-formed, cannot be met with this model's tokens, is over
                a limit, or this model's tokenizer is of a kind that cannot be constrained.
        """
        if (known := self._find(constraint)) is not None:
            return known
        size = num_characters(constraint)
        if size > self._limits.max_characters:
            raise rejected(
                _field(constraint),
                f"holds {size} characters, and at most {self._limits.max_characters} are read",
            )
        matcher = LLMatcher(
            self._library_tokenizer,
            grammar_source(constraint, self.tool_format),
            log_level=0,
            limits=LLParserLimits(
                max_lexer_states=self._limits.max_lexer_states, verbose_errors=False
            ),
        )
        grammar = Grammar(constraint, self._library_tokenizer, matcher)
        self._try(grammar)
        self._keep(constraint, grammar, size)
        return grammar

    @cached_property
    def _library_tokenizer(self) -> LLTokenizer:
        """The model's tokens as the library wants them; made at first use, in half a second."""
        if not self._end_token_ids:
            raise _unsupported("it has no end-of-sequence token")
        if self._tokenizer.vocab_size > self._vocab_size:
            raise _unsupported("its tokenizer has tokens beyond the model's vocabulary")
        try:
            return LLTokenizer(
                self._tokenizer.backend.to_str(),
                n_vocab=self._vocab_size,
                eos_token=self._end_token_ids,
            )
        except ValueError as error:
            raise _unsupported(first_line(str(error))) from error

    def _try(self, grammar: Grammar) -> None:
        """Makes the first mask of a grammar, to see that it has one."""
        matcher, field = grammar.prototype.deep_copy(), _field(grammar.constraint)
        mask = np.zeros(grammar.num_words, dtype=np.uint32)
        if not matcher.is_error():
            matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        if matcher.is_error():
            raise rejected(field, f"cannot be compiled: {first_line(matcher.get_error())}")
        if not mask.any():
            raise rejected(field, "cannot be met: no token of this model begins such a text")

    def _find(self, constraint: Constraint) -> Grammar | None:
        with self._lock:
            if constraint in self._kept:
                self._kept.move_to_end(constraint)
            return self._kept.get(constraint)

    def _keep(self, constraint: Constraint, grammar: Grammar, size: int) -> None:
        with self._lock:
            if constraint in self._kept:  # two callers asked at once
                return
            self._kept[constraint] = grammar
            self._num_characters += size
            while (
                len(self._kept) > self._limits.max_entries
                or self._num_characters > self._limits.max_cached_characters
            ):
                dropped, _ = self._kept.popitem(last=False)
                self._num_characters -= num_characters(dropped)


def num_characters(constraint: Constraint) -> int:
    """Counts the characters of a constraint."""
    return len(json.dumps(astuple(constraint), ensure_ascii=False))


def _field(constraint: Constraint) -> str:
    return _FIELDS[type(constraint).__name__]


def _unsupported(why: str) -> InvalidRequest:
    return InvalidRequest(
        f"This model's text cannot be constrained: {why}.",
        reason=Reason.UNSUPPORTED_OPTION,
        violations={"constraint": why},
    )
