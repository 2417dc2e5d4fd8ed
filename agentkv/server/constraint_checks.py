"""Constraints and tools of a request: their form. What they say is the compiler's to judge."""

from agentkv.constraint import (
    AUTO,
    Choices,
    Constraint,
    Continued,
    JsonSchema,
    Lark,
    Regex,
    Tool,
    Tools,
)
from agentkv.v1 import agentkv_pb2 as pb


def read_constraint(message: pb.Constraint) -> Constraint | None:
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
            tools = [read_tool(tool) for tool in message.tools.tools]
            return Tools(tools, message.tools.choice or AUTO)
        case "continued":
            return Continued() if message.continued else None
    return None


def read_tool(message: pb.Tool) -> Tool:
    """Reads a tool.

    Raises:
        InvalidRequest: Its name or its parameters are none a tool may have.
    """
    return Tool(message.name, message.description, message.parameters or None)
