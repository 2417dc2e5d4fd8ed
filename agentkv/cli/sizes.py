"""Sizes in bytes as people write and read them."""

import re
from typing import Final

UNITS: Final = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}


def parse_bytes(text: str) -> int:
    """Reads a size such as `1GiB`, `512 MB` or `1048576`; a fraction is fine, `1.5GiB`.

    Raises:
        ValueError: It is none; the message shows what one looks like.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    if match is None or match[2].upper() not in UNITS:
        raise ValueError(f"{text!r} is no size; write for example 1GiB, 512MiB or 1048576.")
    return int(float(match[1]) * UNITS[match[2].upper()])


def format_bytes(count: int) -> str:
    """Writes a size with the largest binary unit that leaves at least 1, such as `1.5 GiB`."""
    value, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:.0f} {unit}" if unit == "B" or value >= 100 else f"{value:.3g} {unit}"
