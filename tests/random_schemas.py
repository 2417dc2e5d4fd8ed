"""Random JSON schemas whose values are finite, so that any model comes to their end.

It knows no library that reads them.
"""

from collections.abc import Callable
from random import Random
from typing import Any

Schema = dict[str, Any]

_NAMES = ("id", "name", "a b", "Größe", 'quo"te', "back\\slash", "名前", "x_1", "", "🙂", "true")
_PATTERNS = ("^[a-c]{1,4}$", "^(foo|bar)-[0-9]{2}$", "^\\d{4}-\\d{2}$", "^[A-Z][a-z]{0,3}$")
_CONSTANTS = ("", "yes", "ja / nein", 0, -1, 17, True, None, "line\nbreak", "🙂🙃")


def random_schema(random: Random, depth: int = 3) -> Schema:
    """Draws a schema, nested at most `depth` deep."""
    makers: list[Callable[[Random, int], Schema]] = [
        _string,
        _integer,
        _number,
        _simple,
        _enum,
    ]
    if depth > 0:
        makers += [_object] * (2 * depth) + [_array, _any_of]
    return random.choice(makers)(random, depth)


def _string(random: Random, _: int) -> Schema:
    if random.random() < 0.3:
        return {"type": "string", "pattern": random.choice(_PATTERNS)}
    shortest = random.randint(0, 3)
    return {"type": "string", "minLength": shortest, "maxLength": shortest + random.randint(0, 5)}


def _integer(random: Random, _: int) -> Schema:
    least = random.randint(-1000, 1000)
    return {"type": "integer", "minimum": least, "maximum": least + random.randint(0, 5000)}


def _number(random: Random, _: int) -> Schema:
    least = random.randint(-50, 50)
    return {"type": "number", "minimum": least, "maximum": least + random.randint(1, 100)}


def _simple(random: Random, _: int) -> Schema:
    return {"type": random.choice(("boolean", "null"))}


def _enum(random: Random, _: int) -> Schema:
    if random.random() < 0.3:
        return {"const": random.choice(_CONSTANTS)}
    return {"enum": random.sample(_CONSTANTS, random.randint(1, 4))}


def _object(random: Random, depth: int) -> Schema:
    names = random.sample(_NAMES, random.randint(1, 4))
    return {
        "type": "object",
        "properties": {name: random_schema(random, depth - 1) for name in names},
        "required": [name for name in names if random.random() < 0.7],
        "additionalProperties": False,
    }


def _array(random: Random, depth: int) -> Schema:
    fewest = random.randint(0, 2)
    return {
        "type": "array",
        "items": random_schema(random, depth - 1),
        "minItems": fewest,
        "maxItems": fewest + random.randint(0, 2),
    }


def _any_of(random: Random, depth: int) -> Schema:
    return {"anyOf": [random_schema(random, depth - 1) for _ in range(random.randint(1, 3))]}
