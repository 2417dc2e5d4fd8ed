"""What a generation takes, as options of a call and as messages.

Options are checked by `SamplingParams`, constraints by their own types.
"""

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

from agentkv.constraint import (
    Choices,
    Constraint,
    Continued,
    JsonSchema,
    Lark,
    Regex,
    Tool,
    Tools,
)
from agentkv.errors import InvalidRequest
from agentkv.sampling_params import SamplingParams
from agentkv.v1 import agentkv_pb2 as pb


class SamplingOptions(TypedDict, total=False):
    """Options of a generation, by name; `SamplingParams` says what each means and its default."""

    max_tokens: int
    temperature: float
    top_k: int | None
    top_p: float | None
    min_p: float | None
    typical_p: float | None
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    penalize_prompt: bool
    logit_bias: Mapping[int, float]
    """What is added to the logits of tokens, by token id."""
    allowed_token_ids: Sequence[int]
    banned_token_ids: Sequence[int]
    min_tokens: int
    seed: int | None
    stop: str | Sequence[str]
    """One text, or several."""
    include_stop: bool
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    logprobs: bool
    constraint: Constraint | None
    """What the text must match; None: nothing."""
    top_logprobs: int
    num_speculative_tokens: int | None


def sampling_message(options: SamplingOptions) -> pb.SamplingOptions:
    """Builds the message of what was given; what was not keeps the server's default.

    Raises:
        InvalidRequest: An option is out of its range.
        ValueError: No message can carry it.
    """
    given: dict[str, Any] = dict(options)
    given.pop("constraint", None)
    stop = options.get("stop", ())
    # A text is a sequence of texts as well, of one letter each, which nobody means.
    given["stop"] = (stop,) if isinstance(stop, str) else tuple(stop)
    for name in ("stop_token_ids", "allowed_token_ids", "banned_token_ids"):
        given[name] = tuple(given.get(name, ()))
    given["logit_bias"] = tuple(options.get("logit_bias", {}).items())
    params = SamplingParams(**given)
    # What was not given is not sent: an older server may not know it.
    sent = {name: getattr(params, name) for name in options if name != "constraint"}
    if "logit_bias" in sent:
        sent["logit_bias"] = dict(params.logit_bias)
    return pb.SamplingOptions(**sent)


def constraint_message(constraint: Constraint | None) -> pb.Constraint | None:
    """Builds the message of a constraint.

    Raises:
        InvalidRequest: It is none.
    """
    match constraint:
        case JsonSchema():
            return pb.Constraint(json_schema=constraint.text)
        case Regex():
            return pb.Constraint(regex=constraint.pattern)
        case Lark():
            return pb.Constraint(grammar=constraint.grammar)
        case Choices():
            return pb.Constraint(choices=pb.Choices(texts=constraint.texts))
        case Tools():
            tools = [tool_message(tool) for tool in constraint.tools]
            return pb.Constraint(tools=pb.Tools(tools=tools, choice=constraint.choice))
        case Continued():
            return pb.Constraint(continued=True)
        case None:
            return None
    raise InvalidRequest(
        f"A constraint is JsonSchema, Regex, Lark, Choices, Tools or Continued, not "
        f"{type(constraint).__name__}."
    )


def tool_message(tool: Tool) -> pb.Tool:
    """Builds the message of a tool."""
    return pb.Tool(name=tool.name, description=tool.description, parameters=tool.parameters)
