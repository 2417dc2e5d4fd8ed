"""How the examples draw a tree of contexts as text. It knows no client and no call."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from agentkv import ContextInfo


class Drawn(NamedTuple):
    """One context to draw."""

    parent_id: str | None
    fork_position: int
    length: int
    note: str
    info: ContextInfo | None
    """How it is now; None when it was released."""


def draw(contexts: Mapping[str, Drawn]) -> list[str]:
    """Draws a line for each context.

    Released ones are drawn when something hangs below them, and counted otherwise.

    Args:
        contexts: Contexts by id, parents before what was forked from them.
    """
    branches: defaultdict[str | None, list[str]] = defaultdict(list)
    for id, context in contexts.items():
        branches[context.parent_id].append(id)
    return list(_lines(None, "", contexts, branches))


def _lines(
    parent_id: str | None,
    indent: str,
    contexts: Mapping[str, Drawn],
    branches: Mapping[str | None, Sequence[str]],
) -> Iterator[str]:
    below = branches.get(parent_id, ())
    shown = [id for id in below if contexts[id].info or id in branches]
    num_hidden = len(below) - len(shown)
    for number, id in enumerate(shown, start=1):
        is_last = number == len(shown) and not num_hidden
        is_root = parent_id is None
        yield indent + ("" if is_root else "└─ " if is_last else "├─ ") + _words(contexts[id])
        further = "" if is_root else "   " if is_last else "│  "
        yield from _lines(id, indent + further, contexts, branches)
    if num_hidden:
        yield f"{indent}└─ {num_hidden} released"


def _words(context: Drawn) -> str:
    info = context.info
    words = [f"{context.length} tokens"]
    if context.parent_id is not None:
        words.append(f"forked at {context.fork_position}")
    if info is None:
        words.append("released")
    else:
        words.append(f"blocks {info.shared_blocks} shared + {info.private_blocks} own")
    return ", ".join(words) + (f"  {context.note}" if context.note else "")
