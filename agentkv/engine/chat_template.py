"""Conversations to token ids by the model's own chat template.

It owns that a message never becomes a control token, and that new messages append exactly what the
template writes for the whole conversation. It knows no contexts. Templates and their arguments
never come from a request: the template is the model's.

A marker in a message is hidden from the encoder: a number between two code points that Unicode
reserves stands for it in the rendered text, and becomes plain text again piece by piece.
"""

import json
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from jinja2 import TemplateError
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from agentkv.constraint import Tool
from agentkv.engine.bounded_rendering import RenderingTooLong, run_bounded
from agentkv.engine.conversation import (
    ROLES,
    ChatExtension,
    ChatMessage,
    Conversation,
    Ending,
)
from agentkv.engine.text_checks import check_text
from agentkv.errors import InvalidRequest, Reason

_SENTINELS = tuple(chr(code) for code in range(0xFDD0, 0xFDF0))
"""Code points that Unicode reserves for use inside a program; text does not contain them."""
_REPLACEMENT = "\ufffd"
MAX_SECONDS = 5.0
"""What one rendering may take; a long conversation takes milliseconds."""
MAX_GROWTH = 8
"""Characters a template may write for each that it was given."""
MAX_OWN_CHARACTERS = 1 << 18
"""Characters a template may write by itself."""


class Encoders(NamedTuple):
    """How text becomes tokens; of the model's tokenizer."""

    plain: Callable[[str], list[int]]
    """Reads markers as text."""
    marked: Callable[[str], list[int]]
    """Reads markers as tokens."""
    decode: Callable[[Sequence[int]], str]
    markers: tuple[AddedToken, ...]
    control_ids: frozenset[int]


class ChatTemplate:
    """The chat template of one model; safe to use from several threads at once."""

    def __init__(self, hf_tokenizer: PreTrainedTokenizerFast, encoders: Encoders) -> None:
        self._hf_tokenizer = hf_tokenizer
        self._encoders = encoders
        self._markers = encoders.markers
        self._any_marker = _longest_first(self._markers)
        self._numbers = {token.content: number for number, token in enumerate(self._markers)}

    def encode(self, chat: Conversation) -> list[int]:
        """Encodes a conversation; see `Tokenizer.encode_chat`."""
        self._check(chat)
        sentinel = _unused_sentinel(chat)
        return self._encode(self._render(chat, sentinel), sentinel)

    def extend(
        self, before: Conversation, turn_ids: Sequence[int], added: Conversation
    ) -> ChatExtension:
        """Finds what new messages append; see `Tokenizer.extend_chat`."""
        self._check(added)
        turn = self._read_turn(before, turn_ids)
        if isinstance(turn, str):
            whole = Conversation((*before.messages, *added.messages), added.ending, before.tools)
            sentinel = _unused_sentinel(whole)
            ids = self._encode(self._render(whole, sentinel), sentinel)
            return ChatExtension(tuple(ids), added, turn)
        added = added._replace(messages=(*turn.closing, *added.messages))
        whole = Conversation.joined([before, added])
        sentinel = _unused_sentinel(whole)
        begins = self._render(before, sentinel) + self._hide(turn.text, "assistant", sentinel)
        rendered = self._render(whole, sentinel)
        refusal = "the template writes earlier turns otherwise once others follow"
        if rendered.startswith(begins):
            rest = self._encode_rest(rendered, len(begins), turn, sentinel)
            if rest is not None:
                return ChatExtension(tuple(rest), added)
            refusal = "the last turn does not end where the template ends it"
        return ChatExtension(tuple(self._encode(rendered, sentinel)), added, refusal)

    def _read_turn(self, before: Conversation, turn_ids: Sequence[int]) -> "_Turn | str":
        """Reads what follows a conversation as the assistant's turn; or says why it is none."""
        ids = list(turn_ids)
        end_id = ids.pop() if ids and ids[-1] in self._encoders.control_ids else None
        if not self._encoders.control_ids.isdisjoint(ids):
            return "what follows the last messages holds control tokens"
        if not turn_ids:
            return _Turn("", (), (), None)
        if before.ending is Ending.CLOSED:
            return "what follows the last messages is no turn"
        text = self._encoders.decode(ids)
        if _REPLACEMENT in text and self._encoders.plain(text) != ids:
            return "what follows the last messages holds bytes that are no text"
        first = before.messages[-1].content if before.ending is Ending.CONTINUED else ""
        closing = ChatMessage("assistant", first + text)
        return _Turn(text, tuple(ids), (closing,), end_id)

    def _encode_rest(
        self, rendered: str, cut: int, turn: "_Turn", sentinel: str
    ) -> list[int] | None:
        """Encodes a rendered conversation from a position on; None where no token begins there.

        A marker ends the token before it. Elsewhere the text around the cut is encoded as a whole,
        and has to begin with the tokens that are there already.
        """
        marker = self._any_marker.match(rendered, cut)
        if marker is not None and not self._is_left_stripping(marker[0]):
            ids = self._encode(rendered[cut:], sentinel)
            if turn.end_id is None:
                return ids
            return ids[1:] if ids[0] == turn.end_id else None
        if turn.end_id is not None:
            return None
        if cut == len(rendered):
            return []
        # From the last marker on, so that what stands beside it is encoded as in the whole.
        markers = [match.start() for match in self._any_marker.finditer(rendered, 0, cut)]
        start = markers[-1] if markers else 0
        turn_start = cut - len(self._hide(turn.text, "assistant", sentinel))
        there = [*self._encode(rendered[start:turn_start], sentinel), *turn.ids]
        ids = self._encode(rendered[start:], sentinel)
        return ids[len(there) :] if ids[: len(there)] == there else None

    def _is_left_stripping(self, text: str) -> bool:
        return bool(self._markers[self._numbers[text]].lstrip)

    def _check(self, chat: Conversation) -> None:
        if self._hf_tokenizer.chat_template is None:
            raise InvalidRequest(
                "This model has no chat template; send text instead of messages.",
                reason=Reason.UNSUPPORTED_OPTION,
            )
        if not chat.messages:
            raise InvalidRequest("A conversation needs at least one message.")
        for number, message in enumerate(chat.messages):
            check_text(message.content, f"messages[{number}].content")
            if message.role not in ROLES:
                raise InvalidRequest(
                    f"The role {message.role!r} is unknown; use one of {', '.join(ROLES)}.",
                    violations={f"messages[{number}].role": "unknown role"},
                )
        for tool in chat.tools:
            _described(tool)
        if chat.ending is Ending.CONTINUED and chat.messages[-1].role != "assistant":
            raise InvalidRequest(
                "Only an assistant's message can be continued.",
                violations={"messages": "must end with an assistant's message to continue it"},
            )

    def _render(self, chat: Conversation, sentinel: str) -> str:
        """Renders a conversation whose markers are hidden."""
        messages = [
            {"role": role, "content": self._hide(content, role, sentinel)}
            for role, content in chat.messages
        ]
        tools = [_hidden(_described(tool), self._hide, sentinel) for tool in chat.tools]
        num_given = sum(len(content) for _, content in chat.messages)
        num_given += sum(len(tool.parameters) + len(tool.description) for tool in chat.tools)

        def render() -> object:
            return self._hf_tokenizer.apply_chat_template(
                messages,
                tools=tools or None,
                tokenize=False,
                add_generation_prompt=chat.ending is Ending.PROMPTED,
                continue_final_message=chat.ending is Ending.CONTINUED,
            )

        try:
            rendered = run_bounded(
                render,
                max_seconds=MAX_SECONDS,
                max_characters=MAX_GROWTH * num_given + MAX_OWN_CHARACTERS,
            )
        except RenderingTooLong as error:
            raise InvalidRequest(
                f"The model's chat template {error} for this conversation; send less, or text.",
                violations={"messages": f"the template {error}"},
            ) from error
        except (
            TemplateError,
            TypeError,
            ValueError,
            LookupError,
            AttributeError,
            ArithmeticError,
            RecursionError,
        ) as error:
            raise InvalidRequest(
                f"The model's chat template refuses these messages: {error}",
                violations={"messages": "are refused by the model's chat template"},
            ) from error
        assert isinstance(rendered, str)
        return rendered

    def _hide(self, text: str, role: str, sentinel: str) -> str:
        """Writes a number between two sentinels for each marker that has to stay text."""
        only_control = role == "assistant"
        hidden = [token for token in self._markers if token.special or not only_control]
        if not hidden:
            return text
        return _longest_first(hidden).sub(
            lambda match: f"{sentinel}{self._numbers[match[0]]}{sentinel}", text
        )

    def _encode(self, rendered: str, sentinel: str) -> list[int]:
        """Encodes a rendered conversation, in which some markers may be hidden."""
        if sentinel not in rendered:
            return self._encoders.marked(rendered)
        hidden = re.compile(f"{sentinel}(\\d+){sentinel}")
        ids: list[int] = []
        end = 0

        def add_text(text: str) -> None:
            restored = hidden.sub(lambda match: self._markers[int(match[1])].content, text)
            if restored:
                ids.extend(self._encoders.plain(restored))

        for match in self._any_marker.finditer(rendered):
            token = self._markers[self._numbers[match[0]]]
            text = rendered[end : match.start()]
            # As the library does: such a token swallows the white space beside it.
            add_text(text.rstrip() if token.lstrip else text)
            ids.extend(self._encoders.marked(token.content))
            end = match.end()
            while token.rstrip and rendered[end : end + 1].isspace():
                end += 1
        add_text(rendered[end:])
        return ids


class _Turn(NamedTuple):
    """What was said after the last messages."""

    text: str
    ids: tuple[int, ...]
    """Tokens of the text."""
    closing: tuple[ChatMessage, ...]
    """The message that the text makes, or that it completes; none without text."""
    end_id: int | None
    """The control token that ended it, if one did."""


def _described(tool: Tool) -> dict[str, Any]:
    """Describes a tool as chat templates expect it: as a function, in OpenAI's form.

    Raises:
        InvalidRequest: The parameters are no JSON object.
    """
    try:
        parameters = json.loads(tool.parameters)
    except (ValueError, RecursionError):
        parameters = None
    if not isinstance(parameters, dict):
        raise InvalidRequest(
            f"The parameters of the tool {tool.name} are not a JSON object.",
            violations={"messages.tools": "takes parameters that are a JSON schema"},
        )
    function = {"name": tool.name, "description": tool.description, "parameters": parameters}
    return {"type": "function", "function": function}


def _hidden(value: Any, hide: Callable[[str, str, str], str], sentinel: str) -> Any:
    """Hides the markers in every text of a JSON value."""
    if isinstance(value, str):
        return hide(value, "system", sentinel)
    if isinstance(value, list):
        return [_hidden(item, hide, sentinel) for item in value]
    if isinstance(value, dict):
        return {
            hide(key, "system", sentinel): _hidden(item, hide, sentinel)
            for key, item in value.items()
        }
    return value


def _longest_first(tokens: Sequence[AddedToken]) -> re.Pattern[str]:
    if not tokens:
        return re.compile(r"(?!)")  # matches nothing
    texts = sorted((token.content for token in tokens), key=len, reverse=True)
    return re.compile("|".join(re.escape(text) for text in texts))


def _unused_sentinel(chat: Conversation) -> str:
    texts = [message.content for message in chat.messages]
    texts += [json.dumps(_described(tool), ensure_ascii=False) for tool in chat.tools]
    for sentinel in _SENTINELS:
        if not any(sentinel in text for text in texts):
            return sentinel
    raise InvalidRequest("The messages hold every code point that is reserved for programs.")
