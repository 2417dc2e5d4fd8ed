"""Three small tools that a plan may call: they take the text a model wrote, and run none of it.

Each returns a result as text, or raises ValueError that says what is wrong with the call.
"""

import re

UNITS = {
    "second": ("time", 1),
    "minute": ("time", 60),
    "hour": ("time", 3_600),
    "day": ("time", 86_400),
    "week": ("time", 604_800),
    "inch": ("length", 254),
    "foot": ("length", 3_048),
    "yard": ("length", 9_144),
    "centimeter": ("length", 100),
    "meter": ("length", 10_000),
    "kilometer": ("length", 10_000_000),
    "gram": ("weight", 1),
    "kilogram": ("weight", 1_000),
}
"""For each unit what it measures, and its size: in seconds, tenths of a millimeter or grams."""
MEANINGS = {
    "break": "a break is a rest from work",
    "day": "a day is the time from one midnight to the next",
    "door": "a door closes an opening in a wall",
    "fence": "a fence is a wall of wood or wire",
    "foot": "a foot is the part of the leg below the ankle",
    "holiday": "a holiday is a time free from work",
    "road": "a road is a way for cars",
    "rope": "a rope is a thick, strong cord",
    "table": "a table is a flat top on legs",
    "trip": "a trip is a journey to a place and back",
    "yard": "a yard is a piece of ground next to a house",
}
IRREGULAR = {"feet": "foot", "inches": "inch"}


def convert(call: str) -> str:
    """Converts between units of the same kind: `2 hours to minutes`."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ([a-z]+) to ([a-z]+)", call)
    if not found:
        raise ValueError("this is not a conversion")
    (kind, size), (target_kind, target_size) = (_unit(found[2]), _unit(found[3]))
    if kind != target_kind:
        raise ValueError(f"{kind} is not {target_kind}")
    return f"{float(found[1]) * size / target_size:g} {found[3]}"


def calculate(call: str) -> str:
    """Computes with two whole numbers: `5 * 6`."""
    found = re.fullmatch(r"(\d{1,9}) ?([-+*/]) ?(\d{1,9})", call)
    if not found:
        raise ValueError("this is not a number")
    left, right = int(found[1]), int(found[3])
    match found[2]:
        case "+":
            return str(left + right)
        case "-":
            return str(left - right)
        case "*":
            return str(left * right)
    if right == 0:
        raise ValueError("this divides by zero")
    return f"{left / right:g}"


def lookup(call: str) -> str:
    """Looks a word up in a small dictionary: `puppy`."""
    word = _singular(call)
    if word not in MEANINGS:
        raise ValueError("this is not a word")
    return MEANINGS[word]


def _unit(name: str) -> tuple[str, int]:
    unit = _singular(name)
    if unit not in UNITS:
        raise ValueError("this is not a unit")
    return UNITS[unit]


def _singular(word: str) -> str:
    return IRREGULAR.get(word, word.removesuffix("s"))
