"""A constraint as the library's own grammar text. It compiles nothing."""

import json
from typing import TYPE_CHECKING

from llguidance import LLMatcher, grammar_from

from agentkv.constraint import (
    AUTO,
    Choices,
    Constraint,
    Continued,
    JsonSchema,
    Lark,
    Regex,
    Tools,
    rejected,
)
from agentkv.engine.tool_format import ToolFormat

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions  # declared for type checkers alone

JSON_STYLE: "JsonCompileOptions" = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
}
"""One way to write a value, that of `json.dumps`: a model that may choose white space can write
it without end, and what is forced need not be sampled."""


def grammar_source(constraint: Constraint, tool_format: ToolFormat) -> str:
    """Writes a constraint for the library.

    Raises:
        InvalidRequest: It is not even JSON, or names no new constraint.
    """
    match constraint:
        case JsonSchema():
            return _json_schema(constraint.text)
        case Regex():
            return LLMatcher.grammar_from_regex(constraint.pattern)
        case Lark():
            return grammar_from("lark", constraint.grammar)
        case Choices():
            texts = " | ".join(map(_quoted, constraint.texts))
            return grammar_from("lark", f"start: {texts}")
        case Tools():
            return grammar_from("lark", _tools(constraint, tool_format))
        case Continued():
            raise rejected("continued", "names no grammar of its own")


def _json_schema(text: str) -> str:
    try:
        return LLMatcher.grammar_from_json_schema(text, defaults=JSON_STYLE)
    except ValueError as error:
        raise rejected("json_schema", f"is no JSON object: {error}") from error


def _tools(tools: Tools, tool_format: ToolFormat) -> str:
    """Writes a call of one of the tools, after any text where the model may also not call."""
    is_free = tools.choice == AUTO
    trigger = tool_format.trigger
    start = "start: TEXT | call" if is_free else "start: call"
    lines = ["%llguidance {}", start, r"TEXT: /(.|\n)*/"]
    if is_free:
        lines.append(f"trigger[lazy]: TEXT {_quoted(trigger)}")
    names = []
    for number, tool in enumerate(tools.callable_tools):
        names.append(f"tool_{number}")
        opening = tool_format.opening(tool.name).removeprefix(trigger)
        lines.append(
            f"tool_{number}: {_quoted(opening)} arguments_{number} {_quoted(tool_format.end)}"
        )
        lines.append(f"arguments_{number}: %json {_styled(tool.parameters)}")
    head = "trigger" if is_free else _quoted(trigger)
    lines.append(f"call: {head} ({' | '.join(names)})")
    return "\n".join(lines)


def _styled(schema: str) -> str:
    """Adds to a schema how its values are written, unless it says so itself."""
    try:
        parsed = json.loads(schema)
    except (ValueError, RecursionError) as error:
        raise rejected("tools", f"takes parameters that are JSON: {error}") from error
    if not isinstance(parsed, dict):
        raise rejected("tools", "takes parameters that are a JSON schema, an object")
    return json.dumps({"type": "object", "x-guidance": JSON_STYLE} | parsed, ensure_ascii=False)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
