"""Who descends from whom among contexts. It reads what they know of each other, no handle."""

from collections.abc import Iterable

from agentkv.core.context import Context


def descendants(context: Context) -> list[Context]:
    """Lists a context and all living contexts forked from it, children before parents."""
    found = [context]
    for node in found:
        found.extend(node.children)
    return found[::-1]


def family(context: Context, living: Iterable[Context]) -> list[Context]:
    """Lists a context and all that descend from it, ancestors first.

    Unlike `descendants` it reaches what hangs below a released context too.

    Args:
        context: Where the family begins.
        living: All contexts that may be part of it.
    """
    found: dict[Context, bool] = {context: True}
    for other in living:
        chain, node = [], other
        while node not in found and node.parent is not None:
            chain.append(node)
            node = node.parent
        is_below = found.setdefault(node, False)
        found.update(dict.fromkeys(chain, is_below))
    members = (other for other, is_below in found.items() if is_below)
    return sorted(
        (other for other in members if not other.is_released), key=lambda other: other.number
    )
