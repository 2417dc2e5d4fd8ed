"""Text of a request to token ids, where it does not hold up other calls.

It owns which thread tokenises, how much at a time, and that a violation names the field of the
request. How text becomes tokens is the tokenizer's.
"""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Final, NamedTuple, TypeVar

from agentkv.engine.conversation import Conversation
from agentkv.errors import InvalidRequest, Reason
from agentkv.server.checks import Checks
from agentkv.server.inputs import ChatInput, TextInput, TokenInput
from agentkv.server.served_engine import ServedEngine, TokenizerLike

T = TypeVar("T")

INLINE_CHARACTERS: Final = 2048
"""Text up to here is tokenised on the event loop: a hop to a thread would take longer."""
PIECE_CHARACTERS: Final = 1 << 16
"""Of many texts, so much is tokenised before it is looked whether to go on."""


class EncodedExtension(NamedTuple):
    """What an extend appends."""

    token_ids: tuple[int, ...]
    expected_length: int | None
    """Length at which that is right; None: any."""
    chat: Conversation | None = None
    """What it adds to the context's conversation."""


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
        case TextInput(text, allow_special):
            field = "text"
            with _naming(field):
                encoded = await _off_loop(
                    len(text), lambda: tokenizer.encode_prompt(text, allow_special=allow_special)
                )
        case ChatInput(chat):
            field = "messages"
            # Never on the event loop: how long a template takes does not follow from the length.
            with _naming(field):
                encoded = await asyncio.to_thread(
                    tokenizer.encode_chat, chat.messages, ending=chat.ending, tools=chat.tools
                )
    token_ids = checks.inputs.tokenised(encoded, field)
    checks.finish()
    return token_ids


async def encode_extension(
    engine: ServedEngine,
    tenant: str,
    context_id: str,
    extension: TextInput | ChatInput | TokenInput,
    expected_length: int | None,
    checks: Checks,
) -> EncodedExtension:
    """Tokenises what an extend appends; messages as the conversation so far demands.

    Raises:
        InvalidRequest: The text is none the tokenizer takes, or holds no or too many tokens; or
            the messages cannot be appended, with the reason.
        NotFound, ContextBusy, ContextMoved: Of a context that messages are to follow.
    """
    if not isinstance(extension, ChatInput):
        (token_ids,) = await encode_inputs(engine.tokenizer, [extension], lambda i: "text", checks)
        return EncodedExtension(token_ids, expected_length)
    state = await engine.chat(tenant, context_id, expected_length=expected_length)
    with _naming("messages"):
        found = await asyncio.to_thread(
            engine.tokenizer.extend_chat, state.conversation, state.turn_ids, extension.chat
        )
    if found.refusal:
        read = await engine.tokens(tenant, context_id)
        raise InvalidRequest(
            f"The messages cannot be appended: {found.refusal}. Create with the whole conversation "
            "reuses what it has in common with this context.",
            reason=Reason.CHAT_NOT_EXTENDABLE,
            metadata={"common_length": _num_common(read.token_ids, found.token_ids)},
        )
    token_ids = checks.inputs.tokenised(found.token_ids, "messages")
    checks.finish()
    return EncodedExtension(token_ids, state.length, found.added)


async def encode_inputs(
    tokenizer: TokenizerLike,
    inputs: Sequence[TextInput | TokenInput],
    field: Callable[[int], str],
    checks: Checks,
) -> list[tuple[int, ...]]:
    """Tokenises what is text; `field` names the i-th input in a violation.

    Piece by piece: a call that was cancelled, or whose tokens are too many already, ends there.

    Raises:
        InvalidRequest: A text is none the tokenizer takes, or holds no or too many tokens.
    """

    def encode(number: int, item: TextInput | TokenInput) -> Sequence[int]:
        if isinstance(item, TokenInput):
            return item.token_ids
        with _naming(field(number)):
            return tokenizer.encode(item.text, allow_special=item.allow_special)

    def encode_all(piece: Sequence[tuple[int, TextInput | TokenInput]]) -> list[Sequence[int]]:
        return [encode(number, item) for number, item in piece]

    token_ids: list[tuple[int, ...]] = []
    for piece in _pieces(inputs):
        size = sum(len(item.text) for _, item in piece if isinstance(item, TextInput))
        encoded = await _off_loop(size, partial(encode_all, piece))
        for (number, _), ids in zip(piece, encoded, strict=True):
            token_ids.append(checks.inputs.tokenised(ids, field(number)))
        checks.finish()
    return token_ids


def _pieces(
    inputs: Sequence[TextInput | TokenInput],
) -> Iterator[list[tuple[int, TextInput | TokenInput]]]:
    """Groups numbered inputs, each group of little text or of one input."""
    piece: list[tuple[int, TextInput | TokenInput]] = []
    size = 0
    for number, item in enumerate(inputs):
        length = len(item.text) if isinstance(item, TextInput) else 0
        if piece and size + length > PIECE_CHARACTERS:
            yield piece
            piece, size = [], 0
        piece.append((number, item))
        size += length
    if piece:
        yield piece


async def _off_loop(size: int, work: Callable[[], T]) -> T:
    """Runs work on text of `size` characters where it does not hold up other calls."""
    return work() if size <= INLINE_CHARACTERS else await asyncio.to_thread(work)


def _num_common(first: Sequence[int], second: Sequence[int]) -> int:
    """Counts the tokens with which both begin."""
    pairs = zip(first, second, strict=False)
    shorter = min(len(first), len(second))
    return next((i for i, (one, other) in enumerate(pairs) if one != other), shorter)


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
