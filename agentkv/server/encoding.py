"""Text of a request to token ids, where it does not hold up other calls.

It owns which thread tokenises, and that a violation names the field of the request. How text
becomes tokens is the tokenizer's.
"""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final, TypeVar

from agentkv.errors import InvalidRequest
from agentkv.server.checks import Checks
from agentkv.server.inputs import ChatInput, TextInput, TokenInput
from agentkv.server.served_engine import TokenizerLike

T = TypeVar("T")

INLINE_CHARACTERS: Final = 2048
"""Text up to here is tokenised on the event loop: a hop to a thread would take longer."""


async def encode_prompt(
    tokenizer: TokenizerLike, prompt: TextInput | ChatInput | TokenInput, checks: Checks
) -> tuple[int, ...]:
    """Tokenises the first tokens of a context.

    Raises:
        InvalidRequest: The text is none the tokenizer takes, or holds no or too many tokens.
    """
    match prompt:
        case TokenInput():
            return prompt.token_ids
        case TextInput():
            field, size = "text", len(prompt.text)

            def encode() -> Sequence[int]:
                return tokenizer.encode_prompt(prompt.text, allow_special=prompt.allow_special)

        case ChatInput():
            field, size = "messages", sum(len(item.content) for item in prompt.messages)

            def encode() -> Sequence[int]:
                return tokenizer.encode_chat(
                    prompt.messages, add_generation_prompt=prompt.add_generation_prompt
                )

    with _naming(field):
        encoded = await _off_loop(size, encode)
    token_ids = checks.tokenised(encoded, field)
    checks.finish()
    return token_ids


async def encode_inputs(
    tokenizer: TokenizerLike,
    inputs: Sequence[TextInput | TokenInput],
    field: Callable[[int], str],
    checks: Checks,
) -> list[tuple[int, ...]]:
    """Tokenises what is text; `field` names the i-th input in a violation.

    Raises:
        InvalidRequest: A text is none the tokenizer takes, or holds no or too many tokens.
    """

    def encode(number: int, item: TextInput | TokenInput) -> Sequence[int]:
        if isinstance(item, TokenInput):
            return item.token_ids
        with _naming(field(number)):
            return tokenizer.encode(item.text, allow_special=item.allow_special)

    def encode_all() -> list[Sequence[int]]:
        return [encode(number, item) for number, item in enumerate(inputs)]

    size = sum(len(item.text) for item in inputs if isinstance(item, TextInput))
    encoded = await _off_loop(size, encode_all)
    token_ids = [checks.tokenised(ids, field(i)) for i, ids in enumerate(encoded)]
    checks.finish()
    return token_ids


async def _off_loop(size: int, work: Callable[[], T]) -> T:
    """Runs work on text of `size` characters where it does not hold up other calls."""
    return work() if size <= INLINE_CHARACTERS else await asyncio.to_thread(work)


@contextmanager
def _naming(field: str) -> Iterator[None]:
    """Names the field of the request in a violation; the tokenizer calls any text `text`."""
    try:
        yield
    except InvalidRequest as error:
        raise InvalidRequest(
            error.message,
            reason=error.reason,
            metadata=error.metadata,
            violations={
                field if name == "text" else name: what for name, what in error.violations.items()
            },
        ) from None
