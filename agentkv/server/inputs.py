"""What a request gives as tokens, in its three forms, checked and not yet tokenised."""

from typing import NamedTuple

from agentkv.engine.tokenizer import ChatMessage


class TextInput(NamedTuple):
    """Text to tokenise."""

    text: str
    allow_special: bool


class ChatInput(NamedTuple):
    """A conversation to render and tokenise."""

    messages: tuple[ChatMessage, ...]
    add_generation_prompt: bool


class TokenInput(NamedTuple):
    """Token ids, checked."""

    token_ids: tuple[int, ...]
