"""The turns of a chat, as values; how they become tokens is the chat template's."""

from collections.abc import Iterable
from enum import StrEnum
from typing import NamedTuple

from agentkv.constraint import Tool

ROLES = ("system", "developer", "user", "assistant", "tool")
"""A closed list, because a role is written into the prompt unescaped."""


class ChatMessage(NamedTuple):
    """One turn of a conversation."""

    role: str
    content: str


class Ending(StrEnum):
    """What follows the last message."""

    CLOSED = "closed"
    """Nothing: it ends as the template ends it."""
    PROMPTED = "prompted"
    """The opening of an assistant's turn."""
    CONTINUED = "continued"
    """Nothing, and it is not ended either: what comes next goes on with it."""


class Conversation(NamedTuple):
    """The messages of one call, or of several that follow each other."""

    messages: tuple[ChatMessage, ...]
    ending: Ending = Ending.PROMPTED
    tools: tuple[Tool, ...] = ()
    """What the template shows the model as callable; part of the first call alone."""

    @classmethod
    def joined(cls, calls: Iterable["Conversation"]) -> "Conversation":
        """Joins the calls that made a context, oldest first; at least one."""
        first, *others = calls
        messages, ending = list(first.messages), first.ending
        for call in others:
            if ending is Ending.CONTINUED:  # its message was written anew, as a whole
                messages.pop()
            messages += call.messages
            ending = call.ending
        return cls(tuple(messages), ending, first.tools)


class ChatExtension(NamedTuple):
    """What new messages append to a context, or why they cannot be appended."""

    token_ids: tuple[int, ...]
    """The tokens to append; with a refusal, those of the whole conversation instead."""
    added: Conversation
    """The new messages, after the turn that they close."""
    refusal: str = ""
    """Why the template's text for the whole conversation does not begin with the context's."""
