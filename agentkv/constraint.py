"""What generated text must match: frozen values, as the caller writes them.

They know no tokenizer and are not compiled: whether a schema or a pattern is a good one is found
out where the model's tokens are known. Equal values compile once.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentkv.errors import InvalidRequest, Reason

MAX_CHOICES = 1024
MAX_TOOLS = 128
MAX_TOOL_NAME = 64

AUTO = "auto"
"""The model may answer in text, or call one of the tools."""
REQUIRED = "required"
"""The model must call one of the tools."""


@dataclass(frozen=True, slots=True, init=False)
class JsonSchema:
    """A JSON value that a schema describes, written on one line as `json.dumps` writes it."""

    text: str

    def __init__(self, schema: Mapping[str, Any] | str) -> None:
        """Takes a schema as a mapping, or as JSON text."""
        object.__setattr__(self, "text", _json(schema, "json_schema"))


@dataclass(frozen=True, slots=True)
class Regex:
    """Text that a regular expression matches as a whole, in the syntax of Rust's `regex`."""

    pattern: str


@dataclass(frozen=True, slots=True)
class Lark:
    """Text of a context-free grammar, written in Lark's notation with llguidance's additions."""

    grammar: str


@dataclass(frozen=True, slots=True, init=False)
class Choices:
    """One of several texts."""

    texts: tuple[str, ...]

    def __init__(self, texts: Sequence[str]) -> None:
        """Takes 1 to 1,024 texts.

        Raises:
            InvalidRequest: None or too many, or an empty one.
        """
        if isinstance(texts, str) or not (1 <= len(texts) <= MAX_CHOICES and all(texts)):
            raise rejected("choices", f"takes 1 to {MAX_CHOICES} texts, none empty")
        object.__setattr__(self, "texts", tuple(texts))


@dataclass(frozen=True, slots=True, init=False)
class Tool:
    """Something the model may ask its caller to do."""

    name: str
    description: str
    parameters: str
    """JSON schema of the arguments, which are an object; as text."""

    def __init__(
        self, name: str, description: str = "", parameters: Mapping[str, Any] | str | None = None
    ) -> None:
        """Describes a tool; without parameters its arguments are any object.

        Raises:
            InvalidRequest: The name is empty, too long, or not letters, digits, `_`, `-` and `.`.
        """
        if not (0 < len(name) <= MAX_TOOL_NAME and _is_plain(name)):
            raise rejected(
                "tools",
                f"takes names of 1 to {MAX_TOOL_NAME} letters, digits, '_', '-' and '.', "
                f"got {name[:80]!r}",
            )
        object.__setattr__(self, "name", name)
        object.__setattr__(self, "description", description)
        schema = {"type": "object"} if parameters is None else parameters
        object.__setattr__(self, "parameters", _json(schema, "tools"))


@dataclass(frozen=True, slots=True, init=False)
class Tools:
    """A call of one of these tools, in the form the model writes calls in."""

    tools: tuple[Tool, ...]
    choice: str
    """`auto`, `required`, or the name of the one to call."""

    def __init__(self, tools: Sequence[Tool], choice: str = AUTO) -> None:
        """Takes 1 to 128 tools with different names.

        Raises:
            InvalidRequest: None or too many, two of one name, or a choice that names none.
        """
        names = [tool.name for tool in tools]
        if not 1 <= len(names) <= MAX_TOOLS or len(set(names)) < len(names):
            raise rejected("tools", f"takes 1 to {MAX_TOOLS} tools with different names")
        if choice not in (AUTO, REQUIRED, *names):
            raise rejected("tool_choice", f"must be auto, required or a tool, got {choice[:80]!r}")
        object.__setattr__(self, "tools", tuple(tools))
        object.__setattr__(self, "choice", choice)

    @property
    def callable_tools(self) -> tuple[Tool, ...]:
        """The tools that the choice leaves."""
        if self.choice in (AUTO, REQUIRED):
            return self.tools
        return tuple(tool for tool in self.tools if tool.name == self.choice)


@dataclass(frozen=True, slots=True)
class Continued:
    """The constraint of the context's last constrained generation, from where the text is now."""


Constraint = JsonSchema | Regex | Lark | Choices | Tools | Continued
"""One way of saying what generated text must match."""


def rejected(field: str, what: str) -> InvalidRequest:
    """Makes the error of a constraint that cannot be kept."""
    return InvalidRequest(
        f"The constraint is refused: {field} {what}.",
        reason=Reason.GRAMMAR_REJECTED,
        violations={f"constraint.{field}": what},
    )


def _json(value: Mapping[str, Any] | str, field: str) -> str:
    if isinstance(value, str):
        return value
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise rejected(field, f"cannot be written as JSON: {error}") from error


def _is_plain(name: str) -> bool:
    return name.isascii() and all(letter.isalnum() or letter in "_-." for letter in name)
