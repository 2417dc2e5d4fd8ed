"""What a request gives as tokens, in its three forms, checked and not yet tokenised."""

from typing import NamedTuple

from agentkv.engine.conversation import Conversation


class TextInput(NamedTuple):
    """Text to tokenise."""

    text: str
    allow_special: bool


class ChatInput(NamedTuple):
    """A conversation, or messages that follow one, to render and tokenise."""

    chat: Conversation


class TokenInput(NamedTuple):
    """Token ids, checked."""

    token_ids: tuple[int, ...]
