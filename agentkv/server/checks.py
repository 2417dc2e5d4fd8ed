"""What a request must fulfil before the engine hears of it: the only validator.

It owns every limit that is known without the engine's state, and lists all that a request
violates, not only the first. It knows no context: whether a handle names anything, whether a
position lies inside it and whether blocks are free are the engine's to say.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final

from google.protobuf.message import Message

from agentkv.config import LimitsConfig
from agentkv.constraint import (
    AUTO,
    MAX_TOOLS,
    Choices,
    Constraint,
    Continued,
    JsonSchema,
    Lark,
    Regex,
    Tool,
    Tools,
)
from agentkv.core.lease import LeaseMode, LeaseTerms
from agentkv.engine.conversation import ROLES, ChatMessage, Conversation, Ending
from agentkv.engine.outputs import ModelFacts
from agentkv.errors import InvalidRequest, Reason
from agentkv.sampling_params import SamplingParams
from agentkv.server.inputs import ChatInput, TextInput, TokenInput
from agentkv.server.sampling_checks import check_sampling
from agentkv.server.unknown_fields import unknown_fields
from agentkv.v1 import agentkv_pb2 as pb

MAX_LABELS: Final = 64
MAX_LABEL_KEY: Final = 63
MAX_LABEL_VALUE: Final = 256
MAX_MESSAGES: Final = 4096
MAX_PAGE_SIZE: Final = 1000
MAX_PAGE_TOKEN: Final = 512
MAX_RELEASE_COUNT: Final = 10_000
MAX_REQUEST_ID: Final = 36
MAX_TOKENS_READ: Final = 65_536
MAX_CHARACTERS_PER_TOKEN: Final = 32
"""No text that fits a context has more for each token; longer text takes minutes to tokenise."""
DEFAULT_PAGE_SIZE: Final = 100
LEASE_MODES: Final = MappingProxyType(
    {
        pb.LEASE_MODE_UNSPECIFIED: None,
        pb.LEASE_MODE_RETAIN: LeaseMode.RETAIN,
        pb.LEASE_MODE_PIN: LeaseMode.PIN,
        pb.LEASE_MODE_PARK: LeaseMode.PARK,
        pb.LEASE_MODE_DROPPABLE: LeaseMode.DROPPABLE,
    }
)


class Checks:
    """Collects what one request violates; `finish` raises if anything does.

    Each method reads one part of the request and returns its value. A value that is wrong is
    returned as it is: `finish` raises before anyone uses it.
    """

    def __init__(self, request: Message, limits: LimitsConfig, model: ModelFacts) -> None:
        self._request = request
        self._limits = limits
        self._model = model
        self._is_known = False
        self._violations: dict[str, str] = {}
        self._reasons: set[Reason] = set()

    def finish(self) -> None:
        """Raises if the request violates anything, or holds what this version does not know.

        Raises:
            InvalidRequest: Lists every violation. Its reason is theirs when they share one, else
                INVALID_REQUEST.
        """
        if not (self._violations or self._is_known):
            for field in unknown_fields(self._request):
                self._add(field, "is not known to this server", Reason.UNSUPPORTED_OPTION)
            self._is_known = True
        if not self._violations:
            return
        reason = self._reasons.pop() if len(self._reasons) == 1 else Reason.INVALID_REQUEST
        listed = "; ".join(f"{field} {what}" for field, what in self._violations.items())
        raise InvalidRequest(
            f"The request is wrong: {listed}.", reason=reason, violations=self._violations
        )

    def context_id(self, value: str, field: str = "context_id") -> str:
        """Checks that a handle was given; what it names is the engine's to say."""
        self._require(bool(value), field, "must name a context")
        return value

    def context_ids(self, values: Sequence[str]) -> tuple[str, ...]:
        """Checks the handles of one Release; a handle given twice counts once."""
        if not self._require(
            1 <= len(values) <= MAX_RELEASE_COUNT,
            "context_ids",
            f"takes 1 to {MAX_RELEASE_COUNT} handles, got {len(values)}",
        ):
            return ()
        self._require(all(values), "context_ids", "must each name a context")
        return tuple(dict.fromkeys(values))

    def request_id(self, value: str) -> str | None:
        """Checks a request id; None when the caller gave none."""
        self._require(
            len(value) <= MAX_REQUEST_ID and value.isascii() and value.isprintable(),
            "request_id",
            f"must be 1 to {MAX_REQUEST_ID} printable ASCII characters",
        )
        return value or None

    def labels(self, labels: Mapping[str, str]) -> dict[str, str]:
        """Checks the labels of a new context."""
        if not self._require(
            len(labels) <= MAX_LABELS,
            "labels",
            f"takes at most {MAX_LABELS} entries, got {len(labels)}",
        ):
            return {}
        for key, value in labels.items():
            self._require(
                1 <= len(key) <= MAX_LABEL_KEY and "\0" not in key,
                "labels",
                f"takes keys of 1 to {MAX_LABEL_KEY} characters",
            )
            self._require(
                len(value) <= MAX_LABEL_VALUE and "\0" not in value,
                f"labels[{key}]",
                f"must be at most {MAX_LABEL_VALUE} characters",
            )
        # Maps travel in any order, and a repeat must look like the request it repeats.
        return dict(sorted(labels.items()))

    def lease(
        self, request: pb.CreateRequest | pb.ForkRequest | pb.UpdateLeaseRequest | pb.RestoreRequest
    ) -> LeaseTerms | None:
        """Checks the lease that is asked for; None when the caller named none.

        Which times a lease may have is the engine's to say.
        """
        if not request.HasField("lease"):
            return None
        options = request.lease
        self._require(
            options.mode in LEASE_MODES,
            "lease.mode",
            f"is none this server knows, got {options.mode}",
            Reason.UNSUPPORTED_OPTION,
        )
        ttl = options.ttl if options.HasField("ttl") else None
        return LeaseTerms(LEASE_MODES.get(options.mode), ttl, options.may_reduce)

    def snapshot_name(self, value: str) -> str:
        """Checks that a name was given; which names there may be is the engine's to say."""
        self._require(bool(value), "name", "must name a snapshot")
        return value

    def count(self, request: pb.ForkRequest | pb.GenerateBranchesRequest) -> int:
        """Checks the number of branches, before any work grows with it."""
        count = request.count if request.HasField("count") else 1
        most = self._limits.max_fork_count
        self._require(1 <= count <= most, "count", f"must be in [1, {most}], got {count}")
        return count

    def length(self, request: pb.TruncateRequest) -> int:
        """Checks that the length to keep was given: 0 is a length, absence is not."""
        self._require(request.HasField("length"), "length", "must be given")
        return request.length

    def page_size(self, request: pb.ListRequest) -> int:
        """Checks the size of a page."""
        size = request.page_size if request.HasField("page_size") else DEFAULT_PAGE_SIZE
        self._require(
            1 <= size <= MAX_PAGE_SIZE, "page_size", f"must be in [1, {MAX_PAGE_SIZE}], got {size}"
        )
        return size

    def page_token(self, value: str) -> str:
        """Checks that a page token may be one of ours; the engine says whether it is."""
        self._require(len(value) <= MAX_PAGE_TOKEN, "page_token", "is none the server gave")
        return value

    def prompt(self, request: pb.CreateRequest) -> TextInput | ChatInput | TokenInput:
        """Checks the first tokens of a context."""
        match request.WhichOneof("prompt"):
            case "messages":
                return self._chat(request.messages)
            case "token_ids":
                return self._tokens(request.token_ids, "token_ids")
            case "text":
                return self._text(request.text, "text", request.allow_special)
        self._add("prompt", "must be given as text, messages or token_ids")
        return TokenInput(())

    def extension(self, request: pb.ExtendRequest) -> TextInput | ChatInput | TokenInput:
        """Checks the tokens to append."""
        if request.WhichOneof("input") == "messages":
            self._require(
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
            self._add("continuations", f"takes 1 to {most} entries, got {len(given)}")
            return ()
        return tuple(
            self._input(item, f"continuations[{i}].", f"continuations[{i}]", request.allow_special)
            for i, item in enumerate(given)
        )

    def sampling(self, options: pb.SamplingOptions) -> SamplingParams:
        """Checks the sampling options."""
        checked = check_sampling(options, self._model.vocab_size)
        for violation in checked.violations:
            self._add(*violation)
        return checked.params

    def constraint(
        self, request: pb.GenerateRequest | pb.GenerateBranchesRequest
    ) -> Constraint | None:
        """Checks the form of a constraint; what it says is the compiler's to judge."""
        if not request.HasField("constraint"):
            return None
        self._require(
            not request.sampling.ignore_eos,
            "sampling.ignore_eos",
            "contradicts a constraint, which ends the text",
        )
        try:
            constraint = _constraint(request.constraint)
        except InvalidRequest as error:
            for field, what in error.violations.items():
                self._add(field, what, Reason.GRAMMAR_REJECTED)
            return None
        self._require(constraint is not None, "constraint", "must be given in one form")
        return constraint

    def tokenised(self, token_ids: Sequence[int], field: str) -> tuple[int, ...]:
        """Checks what text became: text of one character may be no token at all."""
        self._require(bool(token_ids), field, "holds no token")
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
        self._add(name, "must be given as text or token_ids")
        return TokenInput(())

    def _text(self, text: str, field: str, allow_special: bool) -> TextInput:
        self._require(bool(text), field, "must not be empty")
        if self._is_short(len(text), field):
            self._require("\0" not in text, field, "must not contain NUL")
        return TextInput(text, allow_special)

    def _tokens(self, message: pb.TokenIds, field: str) -> TokenInput:
        width = self._model.vocab_size
        self._require(bool(message.ids), field, "must not be empty")
        if not self._fits(len(message.ids), field):
            return TokenInput(())  # looking at ten million ids would take seconds
        token_ids = tuple(message.ids)
        largest = max(token_ids, default=0)
        self._require(
            largest < width,
            field,
            f"must each be below the vocabulary width {width}, got {largest}",
            Reason.TOKEN_OUT_OF_RANGE,
        )
        return TokenInput(token_ids)

    def _chat(self, chat: pb.ChatMessages) -> ChatInput:
        self._require(
            self._model.has_chat_template,
            "messages",
            "need a chat template, and the model has none",
            Reason.UNSUPPORTED_OPTION,
        )
        if not self._require(
            1 <= len(chat.messages) <= MAX_MESSAGES,
            "messages",
            f"takes 1 to {MAX_MESSAGES} turns, got {len(chat.messages)}",
        ):
            return ChatInput(Conversation(()))
        self._is_short(sum(len(message.content) for message in chat.messages), "messages")
        for i, message in enumerate(chat.messages):
            self._require(
                message.role in ROLES,
                f"messages[{i}].role",
                f"must be one of {', '.join(ROLES)}",
                Reason.UNSUPPORTED_OPTION,
            )
            self._require(
                "\0" not in message.content, f"messages[{i}].content", "must not contain NUL"
            )
        messages = [ChatMessage(message.role, message.content) for message in chat.messages]
        return ChatInput(Conversation(tuple(messages), self._ending(chat), self._tools(chat)))

    def _ending(self, chat: pb.ChatMessages) -> Ending:
        if not chat.continue_final_message:
            has_option = chat.HasField("add_generation_prompt")
            is_closed = has_option and not chat.add_generation_prompt
            return Ending.CLOSED if is_closed else Ending.PROMPTED
        self._require(
            not chat.add_generation_prompt,
            "messages.continue_final_message",
            "contradicts add_generation_prompt",
        )
        self._require(
            chat.messages[-1].role == "assistant",
            "messages.continue_final_message",
            "needs an assistant's message at the end",
        )
        return Ending.CONTINUED

    def _tools(self, chat: pb.ChatMessages) -> tuple[Tool, ...]:
        if not chat.tools:
            return ()
        try:
            tools = Tools([_tool(tool) for tool in chat.tools[: MAX_TOOLS + 1]])
        except InvalidRequest as error:
            for what in error.violations.values():
                self._add("messages.tools", what)
            return ()
        size = sum(len(tool.description) + len(tool.parameters) for tool in tools.tools)
        self._is_short(size, "messages.tools")
        return tools.tools

    def _is_short(self, num_characters: int, field: str) -> bool:
        most = max_characters(self._model)
        return self._require(
            num_characters <= most,
            field,
            f"holds {num_characters} characters, and at most {most} are read",
            Reason.CONTEXT_TOO_LONG,
        )

    def _fits(self, num_tokens: int, field: str) -> bool:
        most = self._model.max_length
        return self._require(
            num_tokens <= most,
            field,
            f"holds {num_tokens} tokens, and the model's longest context is {most}",
            Reason.CONTEXT_TOO_LONG,
        )

    def _require(
        self, holds: bool, field: str, what: str, reason: Reason = Reason.INVALID_REQUEST
    ) -> bool:
        if not holds:
            self._add(field, what, reason)
        return holds

    def _add(self, field: str, what: str, reason: Reason = Reason.INVALID_REQUEST) -> None:
        self._violations.setdefault(field, what)
        self._reasons.add(reason)


def max_characters(model: ModelFacts) -> int:
    """Says how long a text or a conversation may be, in characters, to be tokenised at all."""
    return model.max_length * MAX_CHARACTERS_PER_TOKEN


def _tool(message: pb.Tool) -> Tool:
    return Tool(message.name, message.description, message.parameters or None)


def _constraint(message: pb.Constraint) -> Constraint | None:
    """Reads a constraint; None when it has no form.

    Raises:
        InvalidRequest: Texts or tools are none, too many or ill-named.
    """
    match message.WhichOneof("form"):
        case "json_schema":
            return JsonSchema(message.json_schema)
        case "regex":
            return Regex(message.regex)
        case "grammar":
            return Lark(message.grammar)
        case "choices":
            return Choices(tuple(message.choices.texts))
        case "tools":
            tools = [_tool(tool) for tool in message.tools.tools]
            return Tools(tools, message.tools.choice or AUTO)
        case "continued":
            return Continued() if message.continued else None
    return None
