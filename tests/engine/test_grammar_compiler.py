"""Constraints are compiled once, within limits, and what is wrong is refused by name."""

import asyncio
import json
import threading
from typing import Any

import pytest
from tiny_tokenizers import build_tiny_tokenizer, byte_ids

from agentkv.constraint import (
    Choices,
    Constraint,
    JsonSchema,
    Lark,
    Regex,
    Tool,
    Tools,
)
from agentkv.engine.grammar import Grammar
from agentkv.engine.grammar_compiler import GrammarCompiler, GrammarLimits
from agentkv.engine.tokenizer import Tokenizer
from agentkv.engine.tool_format import ToolCall, ToolFormat
from agentkv.errors import InvalidRequest, Reason

WEATHER = Tool(
    "weather",
    "Tells the weather.",
    {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 8}},
        "required": ["city"],
        "additionalProperties": False,
    },
)
NOW = Tool("now")
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'


def compiler(
    limits: GrammarLimits | None = None, *, vocab_size: int = 300, ends: tuple[int, ...] = (2,)
) -> GrammarCompiler:
    return GrammarCompiler(
        Tokenizer(build_tiny_tokenizer()), vocab_size=vocab_size, end_token_ids=ends, limits=limits
    )


def fits(grammar: Grammar, text: str) -> bool:
    """Whether a whole text is of a grammar."""
    matcher = grammar.prototype.deep_copy()
    ids = byte_ids(Tokenizer(build_tiny_tokenizer()).backend, text.encode())
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


@pytest.mark.parametrize(
    ("constraint", "field"),
    [
        (JsonSchema("{"), "json_schema"),
        (JsonSchema("[]"), "json_schema"),
        (JsonSchema({"type": "strin"}), "json_schema"),
        (JsonSchema({"type": "string", "not": {}}), "json_schema"),
        (JsonSchema({"type": "string", "enum": [1]}), "json_schema"),
        (JsonSchema({"$ref": "#"}), "json_schema"),
        (JsonSchema({"$ref": "http://localhost/other"}), "json_schema"),
        (JsonSchema('{"items":' * 5000 + "{}" + "}" * 5000), "json_schema"),
        (Regex("(a"), "regex"),
        (Regex("a(?=b)"), "regex"),
        (Lark("start: missing"), "grammar"),
        (Lark("rule: /a/"), "grammar"),
        (Lark("start: start"), "grammar"),
        (Regex("a" * 300_000), "regex"),
        (Tools([Tool("f", "", "[")]), "tools"),
        (Tools([Tool("f", "", "[1]")]), "tools"),
        (Tools([Tool("f", "", '{"type": "nothing"}')]), "tools"),
    ],
    ids=range(17),
)
def test_what_is_wrong_is_refused_by_name(constraint: Constraint, field: str) -> None:
    """Catches a grammar that is accepted and fails later, or takes the process with it."""
    grammars = compiler()
    with pytest.raises(InvalidRequest) as caught:
        grammars.compile(constraint)
    assert caught.value.reason is Reason.GRAMMAR_REJECTED
    assert set(caught.value.violations) == {f"constraint.{field}"}
    assert len(caught.value.message) < 1000
    assert len(grammars) == 0


@pytest.mark.parametrize(
    "constraint",
    [
        Regex("((a{1,1000}){1,1000}){1,1000}"),
        Regex("(a|aa|aaa)*{1,500}(b?){500}"),
        Regex("(.*a.{20}){10}"),
        Regex("(a+)+b"),
        JsonSchema({"enum": [f"value {number}" for number in range(10_000)]}),
        JsonSchema(
            {
                "anyOf": [
                    {"type": "object", "properties": {f"p{n}_{m}": {} for m in range(30)}}
                    for n in range(60)
                ]
            }
        ),
        Lark("start: a a a a a a\na: b b b b b b\nb: c c c c c c\nc: /x*/ /x*/ /x*/"),
    ],
    ids=range(7),
)
def test_what_explodes_is_bounded(constraint: Constraint) -> None:
    """Catches a bomb that is neither refused nor usable."""
    reasons: list[Reason | None] = []
    try:
        assert not compiler().compile(constraint).prototype.is_error()
    except InvalidRequest as error:
        reasons.append(error.reason)
    assert set(reasons) <= {Reason.GRAMMAR_REJECTED}


@pytest.mark.parametrize(
    "make",
    [
        lambda: Choices([]),
        lambda: Choices("yes"),
        lambda: Choices(["a", ""]),
        lambda: Choices(["a"] * 1025),
        lambda: Tool(""),
        lambda: Tool('a"b'),
        lambda: Tool("n" * 65),
        lambda: Tools([]),
        lambda: Tools([NOW, Tool("now")]),
        lambda: Tools([NOW], "later"),
        lambda: JsonSchema({"enum": [object()]}),
    ],
)
def test_values_are_checked_where_they_are_made(make: Any) -> None:
    """Catches a constraint whose text could break out of the grammar it is put into."""
    with pytest.raises(InvalidRequest) as caught:
        make()
    assert caught.value.reason is Reason.GRAMMAR_REJECTED


def test_a_grammar_is_compiled_once_and_the_oldest_forgotten() -> None:
    """Catches a cache without a limit, or one that forgets what was just used."""
    grammars = compiler(GrammarLimits(max_entries=2))
    first = grammars.compile(Regex("a"))
    grammars.compile(Regex("b"))
    assert grammars.compile(Regex("a")) is first
    grammars.compile(Regex("c"))
    assert len(grammars) == 2 and grammars.compile(Regex("a")) is first
    by_size = compiler(GrammarLimits(max_cached_characters=100))
    for number in range(5):
        by_size.compile(Regex("a" * 30 + str(number)))
    assert len(by_size) == 2


def test_a_compilation_that_takes_too_long_is_refused() -> None:
    """Catches a caller, or the event loop, that waits for a bomb."""
    grammars = compiler(GrammarLimits(timeout=0.0))
    done = threading.Event()

    async def ask() -> None:
        with pytest.raises(InvalidRequest, match="took longer"):
            await grammars.compile_soon(Regex("a"))
        done.set()

    asyncio.run(ask())
    assert done.is_set()


def test_a_model_that_cannot_be_constrained_says_so() -> None:
    """Catches a mask narrower than the tokenizer, and text that could never end."""
    for grammars in (compiler(vocab_size=97), compiler(ends=())):
        with pytest.raises(InvalidRequest) as caught:
            grammars.compile(Regex("a"))
        assert caught.value.reason is Reason.UNSUPPORTED_OPTION


@pytest.mark.parametrize(
    ("choice", "texts"),
    [
        ("auto", ["", "It is sunny.", CALL, f"Let me see. {CALL}"]),
        ("required", [CALL]),
        ("weather", [CALL]),
    ],
)
def test_tools_allow_what_their_choice_says(choice: str, texts: list[str]) -> None:
    """Catches free text where a call is required, and calls of other tools or arguments."""
    grammar = compiler().compile(Tools([WEATHER, NOW], choice))
    assert all(fits(grammar, text) for text in texts)
    refused = [CALL.replace("Rome", "Rome or Milan"), CALL.replace("city", "town"), CALL[:-3]]
    refused += [CALL + " "] if choice != "auto" else []
    refused += ["It is sunny."] if choice != "auto" else []
    refused += [CALL.replace("weather", "now")] if choice == "weather" else []
    assert not any(fits(grammar, text) for text in refused)


def test_a_call_is_read_back() -> None:
    """Catches a call that is taken for text, or text for a call."""
    tool_format = ToolFormat.of_template(None)
    tools = Tools([WEATHER, NOW])
    expected = (ToolCall("weather", '{"city": "Rome"}'),)
    assert tool_format.read(CALL, tools) == expected
    assert tool_format.read(f"Let me see. {CALL}", tools) == expected
    for text in ("It is sunny.", CALL[:-1], CALL.replace("weather", "other"), CALL + CALL):
        assert tool_format.read(text, tools) == ()


def test_a_template_names_its_form_of_a_call() -> None:
    """Catches a model asked to write calls as another family does."""
    llama = ToolFormat.of_template("{{ '<|python_tag|>' }}")
    tools = Tools([WEATHER], "required")
    text = '{"name": "weather", "parameters": {"city": "Rome"}}'
    assert llama.read(text, tools) == (ToolCall("weather", '{"city": "Rome"}'),)
    made = build_tiny_tokenizer(chat_template="{{ '<|python_tag|>' }}")
    grammars = GrammarCompiler(Tokenizer(made), vocab_size=300, end_token_ids=[2])
    assert fits(grammars.compile(tools), text)


def test_values_are_written_as_json_dumps_writes_them() -> None:
    """Catches white space that a model could write without end."""
    grammar = compiler().compile(JsonSchema({"type": "array", "items": {"type": "integer"}}))
    assert fits(grammar, json.dumps([1, 2, 3]))
    assert not any(fits(grammar, text) for text in ("[1,2]", "[ 1]", "[1, 2] ", "[1,\n2]"))
