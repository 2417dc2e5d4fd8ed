"""What a request gives as tokens, in any of its forms: texts, conversations, token ids.

It bounds the work that a request can ask for before anything is tokenised, and knows no tokenizer.
"""

from collections.abc import Sequence
from typing import Final

from agentkv.config import LimitsConfig
from agentkv.constraint import MAX_TOOLS, Tool, Tools
from agentkv.engine.conversation import ROLES, ChatMessage, Conversation, Ending
from agentkv.engine.outputs import ModelFacts
from agentkv.errors import InvalidRequest, Reason
from agentkv.server.constraint_checks import read_tool
from agentkv.server.inputs import ChatInput, TextInput, TokenInput
from agentkv.server.violations import Violations
from agentkv.v1 import agentkv_pb2 as pb

MAX_MESSAGES: Final = 4096
MAX_CHARACTERS_PER_TOKEN: Final = 32
"""No text that fits a context has more for each token; longer text takes minutes to tokenise."""


class InputChecks:
    """Reads the inputs of one request, and notes what is wrong with them.

    A value that is wrong is not to be used: the request is refused before.
    """

    def __init__(self, violations: Violations, limits: LimitsConfig, model: ModelFacts) -> None:
        self._violations = violations
        self._limits = limits
        self._model = model

    def prompt(self, request: pb.CreateRequest) -> TextInput | ChatInput | TokenInput:
        """Checks the first tokens of a context."""
        match request.WhichOneof("prompt"):
            case "messages":
                return self._chat(request.messages)
            case "token_ids":
                return self._tokens(request.token_ids, "token_ids")
            case "text":
                return self._text(request.text, "text", request.allow_special)
        self._violations.add("prompt", "must be given as text, messages or token_ids")
        return TokenInput(())

    def extension(self, request: pb.ExtendRequest) -> TextInput | ChatInput | TokenInput:
        """Checks the tokens to append."""
        if request.WhichOneof("input") == "messages":
            self._violations.require(
                not request.messages.tools,
                "messages.tools",
                "are given with the first messages of a context alone",
            )
            return self._chat(request.messages)
        return self._input(request, "", "input", request.allow_special)

    def continuations(self, request: pb.ScoreRequest) -> tuple[TextInput | TokenInput, ...]:
        """Checks the continuations to score."""
        given, most = request.continuations, self._limits.max_continuations
        if not 1 <= len(given) <= most:
            self._violations.add("continuations", f"takes 1 to {most} entries, got {len(given)}")
            return ()
        return tuple(
            self._input(item, f"continuations[{i}].", f"continuations[{i}]", request.allow_special)
            for i, item in enumerate(given)
        )

    def tokenised(self, token_ids: Sequence[int], field: str) -> tuple[int, ...]:
        """Checks what text became: text of one character may be no token at all."""
        self._violations.require(bool(token_ids), field, "holds no token")
        self._fits(len(token_ids), field)
        return tuple(token_ids)

    def _input(
        self,
        message: pb.ExtendRequest | pb.Continuation,
        prefix: str,
        name: str,
        allow_special: bool,
    ) -> TextInput | TokenInput:
        match message.WhichOneof("input"):
            case "text":
                return self._text(message.text, f"{prefix}text", allow_special)
            case "token_ids":
                return self._tokens(message.token_ids, f"{prefix}token_ids")
        self._violations.add(name, "must be given as text or token_ids")
        return TokenInput(())

    def _text(self, text: str, field: str, allow_special: bool) -> TextInput:
        self._violations.require(bool(text), field, "must not be empty")
        if self._is_short(len(text), field):
            self._violations.require("\0" not in text, field, "must not contain NUL")
        return TextInput(text, allow_special)

    def _tokens(self, message: pb.TokenIds, field: str) -> TokenInput:
        width = self._model.vocab_size
        self._violations.require(bool(message.ids), field, "must not be empty")
        if not self._fits(len(message.ids), field):
            return TokenInput(())  # looking at ten million ids would take seconds
        token_ids = tuple(message.ids)
        largest = max(token_ids, default=0)
        self._violations.require(
            largest < width,
            field,
            f"must each be below the vocabulary width {width}, got {largest}",
            Reason.TOKEN_OUT_OF_RANGE,
        )
        return TokenInput(token_ids)

    def _chat(self, chat: pb.ChatMessages) -> ChatInput:
        self._violations.require(
            self._model.has_chat_template,
            "messages",
            "need a chat template, and the model has none",
            Reason.UNSUPPORTED_OPTION,
        )
        if not self._violations.require(
            1 <= len(chat.messages) <= MAX_MESSAGES,
            "messages",
            f"takes 1 to {MAX_MESSAGES} turns, got {len(chat.messages)}",
        ):
            return ChatInput(Conversation(()))
        self._is_short(sum(len(message.content) for message in chat.messages), "messages")
        for i, message in enumerate(chat.messages):
            self._violations.require(
                message.role in ROLES,
                f"messages[{i}].role",
                f"must be one of {', '.join(ROLES)}",
                Reason.UNSUPPORTED_OPTION,
            )
            self._violations.require(
                "\0" not in message.content, f"messages[{i}].content", "must not contain NUL"
            )
        messages = [ChatMessage(message.role, message.content) for message in chat.messages]
        return ChatInput(Conversation(tuple(messages), self._ending(chat), self._tools(chat)))

    def _ending(self, chat: pb.ChatMessages) -> Ending:
        if not chat.continue_final_message:
            has_option = chat.HasField("add_generation_prompt")
            is_closed = has_option and not chat.add_generation_prompt
            return Ending.CLOSED if is_closed else Ending.PROMPTED
        self._violations.require(
            not chat.add_generation_prompt,
            "messages.continue_final_message",
            "contradicts add_generation_prompt",
        )
        self._violations.require(
            chat.messages[-1].role == "assistant",
            "messages.continue_final_message",
            "needs an assistant's message at the end",
        )
        return Ending.CONTINUED

    def _tools(self, chat: pb.ChatMessages) -> tuple[Tool, ...]:
        if not chat.tools:
            return ()
        try:
            tools = Tools([read_tool(tool) for tool in chat.tools[: MAX_TOOLS + 1]])
        except InvalidRequest as error:
            for what in error.violations.values():
                self._violations.add("messages.tools", what)
            return ()
        size = sum(len(tool.description) + len(tool.parameters) for tool in tools.tools)
        self._is_short(size, "messages.tools")
        return tools.tools

    def _is_short(self, num_characters: int, field: str) -> bool:
        most = max_characters(self._model)
        return self._violations.require(
            num_characters <= most,
            field,
            f"holds {num_characters} characters, and at most {most} are read",
            Reason.CONTEXT_TOO_LONG,
        )

    def _fits(self, num_tokens: int, field: str) -> bool:
        most = self._model.max_length
        return self._violations.require(
            num_tokens <= most,
            field,
            f"holds {num_tokens} tokens, and the model's longest context is {most}",
            Reason.CONTEXT_TOO_LONG,
        )


def max_characters(model: ModelFacts) -> int:
    """Says how long a text or a conversation may be, in characters, to be tokenised at all."""
    return model.max_length * MAX_CHARACTERS_PER_TOKEN
