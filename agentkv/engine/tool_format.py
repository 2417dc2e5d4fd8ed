"""How a model writes the calls of tools, and how they are read back.

It owns the few forms that chat templates teach their models. Which one is a model's is read off
its template; a model whose template names none is asked for the most common one.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from agentkv.constraint import Tools


class ToolCall(NamedTuple):
    """What the model asks its caller to do."""

    name: str
    arguments: str
    """A JSON object, as text."""


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """The text around the name and the arguments of a call."""

    begin: str
    """What opens a call. Text before it is the model's own words."""
    before_arguments: str
    """Between the name and the arguments."""
    end: str
    """What follows the arguments."""

    @classmethod
    def of_template(cls, template: str | None) -> "ToolFormat":
        """Finds the form that a chat template shows its model."""
        if template is not None and "<|python_tag|>" in template:  # Llama 3: an object, bare
            return ToolFormat('{"name": "', '", "parameters": ', "}")
        return ToolFormat('<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>")

    @property
    def trigger(self) -> str:
        """The shortest beginning by which a call is told from other text."""
        line = self.begin.partition("\n")[0]
        return line if line != self.begin else self.begin

    def opening(self, name: str) -> str:
        """Writes a call of a tool up to its arguments."""
        return f"{self.begin}{name}{self.before_arguments}"

    def read(self, text: str, tools: Tools) -> Sequence[ToolCall]:
        """Finds the call that ends a text, if one does.

        Args:
            text: What was generated under the tools' grammar.
            tools: Those that could be called.
        """
        if not text.endswith(self.end):
            return ()
        for tool in tools.callable_tools:
            before, opening, rest = text.rpartition(self.opening(tool.name))
            arguments = rest.removesuffix(self.end)
            if opening and self.begin not in before and _is_object(arguments):
                return (ToolCall(tool.name, arguments),)
        return ()


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False
