"""How the contexts of a server are drawn. It knows values of the SDK and no connection."""

from collections import defaultdict
from collections.abc import Mapping, Sequence

from rich.console import Group, RenderableType
from rich.text import Text
from rich.tree import Tree

from agentkv.client.server_info import ServerInfo
from agentkv.client.values import ContextInfo, LeaseMode, PoolInfo, Residency

SHORT = 6
"""Characters of a handle that are shown: its end, since all handles of a server begin alike."""
MAX_DEPTH = 20
"""Forks below a root that are drawn: further down no room is left on the line."""

Branches = Mapping[str | None, Sequence[ContextInfo]]
"""Contexts by what they were forked from."""


def draw(address: str, server: ServerInfo, contexts: Sequence[ContextInfo]) -> RenderableType:
    """Draws every context below what it was forked from, and sums up.

    Args:
        address: Where the server is.
        server: Its own description.
        contexts: Every context, in any order: other clients fork and release while it is listed.
    """
    title = Text.assemble((address, "bold"), f"  {server.model.name} {server.model.dtype}")
    top = Tree(title, guide_style="dim")
    branches: defaultdict[str | None, list[ContextInfo]] = defaultdict(list)
    for context in sorted(contexts, key=lambda context: context.create_time):
        branches[context.parent_id].append(context)
    known = {None, *(context.id for context in contexts)}
    waiting = [(top, branches[None], 0)]
    for parent_id in [id for id in branches if id not in known]:
        # Its branches still belong together.
        released = Text(f"{short_id(parent_id or '')} released", style="dim strike")
        waiting.append((top.add(released), branches[parent_id], 1))
    while waiting:  # a loop, for trees may be deeper than the interpreter's stack
        node, below, depth = waiting.pop()
        if below and depth == MAX_DEPTH:
            node.add(Text(f"… {_count(below, branches):,} more below", style="dim"))
            continue
        waiting.extend((node.add(_line(child)), branches[child.id], depth + 1) for child in below)
    if not contexts:
        top.add(Text("no contexts", style="dim"))
    return Group(top, _totals(contexts, server.pool))


def sharing_ratio(contexts: Sequence[ContextInfo], pool: PoolInfo) -> float:
    """Divides the blocks that contexts list by the blocks there are; 1 when nothing is held."""
    logical = sum(context.private_blocks + context.shared_blocks for context in contexts)
    return logical / pool.live_blocks if pool.live_blocks else 1.0


def _count(contexts: Sequence[ContextInfo], branches: Branches) -> int:
    """Counts these and everything below them."""
    count, waiting = 0, list(contexts)
    while waiting:
        count += 1
        waiting.extend(branches[waiting.pop().id])
    return count


def _line(context: ContextInfo) -> Text:
    line = Text.assemble(
        (short_id(context.id), "bold cyan"),
        f"  {context.length:,} tokens",
        (f" from {context.fork_position:,}" if context.parent_id is not None else "", "dim"),
        "  blocks ",
        (f"{context.private_blocks} alone", "yellow"),
        " + ",
        (f"{context.shared_blocks} shared", "green"),
    )
    if context.adapter:
        line.append(f"  adapter {context.adapter}", "blue")
    for mark in _marks(context):
        line.append(f"  {mark}", "bold magenta")
    if context.labels:
        line.append(f"  {_labels(context.labels)}", "italic")
    return line


def _marks(context: ContextInfo) -> list[str]:
    marks = ["busy"] * context.busy + ["pinned"] * context.pinned
    if context.lease.expire_time is None:
        marks.append("lease expired")
    elif context.lease.mode in (LeaseMode.PARK, LeaseMode.DROPPABLE):
        marks.append("parked" if context.lease.mode is LeaseMode.PARK else "droppable")
    if context.residency is not Residency.DEVICE:
        marks.append(f"KV {context.residency}, {context.num_computed_tokens:,} computed")
    return marks


def _labels(labels: Mapping[str, str]) -> str:
    return " ".join(f"{name}={value}" for name, value in sorted(labels.items()))


def _totals(contexts: Sequence[ContextInfo], pool: PoolInfo) -> Text:
    return Text(
        f"{len(contexts):,} contexts, {sum(context.length for context in contexts):,} tokens; pool "
        f"of {pool.total_blocks:,} blocks: {pool.live_blocks:,} live, {pool.cached_blocks:,} "
        f"cached, {pool.free_blocks:,} free; pressure {pool.level}; sharing ratio "
        f"{sharing_ratio(contexts, pool):.2f}",
        style="bold",
    )


def short_id(id: str) -> str:
    """Names a context by the end of its handle."""
    return f"…{id[-SHORT:]}"
