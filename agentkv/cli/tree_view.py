"""How the contexts of a server are drawn. It knows values of the SDK and no connection."""

from collections.abc import Mapping, Sequence

from rich.console import Group, RenderableType
from rich.text import Text
from rich.tree import Tree

from agentkv.client.server_info import ServerInfo
from agentkv.client.values import ContextInfo, PoolInfo, Residency

SHORT = 6
"""Characters of a handle that are shown: its end, since all handles of a server begin alike."""


def draw(address: str, server: ServerInfo, contexts: Sequence[ContextInfo]) -> RenderableType:
    """Draws every context below what it was forked from, and sums up.

    Args:
        address: Where the server is.
        server: Its own description.
        contexts: Every context, parents before their branches.
    """
    title = Text.assemble((address, "bold"), f"  {server.model.name} {server.model.dtype}")
    top = Tree(title, guide_style="dim")
    nodes: dict[str, Tree] = {}
    for context in contexts:
        nodes[context.id] = _parent_node(top, nodes, context).add(_line(context))
    if not contexts:
        top.add(Text("no contexts", style="dim"))
    return Group(top, _totals(contexts, server.pool))


def sharing_ratio(contexts: Sequence[ContextInfo], pool: PoolInfo) -> float:
    """Divides the blocks that contexts list by the blocks there are; 1 when nothing is held."""
    logical = sum(context.private_blocks + context.shared_blocks for context in contexts)
    return logical / pool.live_blocks if pool.live_blocks else 1.0


def _parent_node(top: Tree, nodes: dict[str, Tree], context: ContextInfo) -> Tree:
    if context.parent_id is None:
        return top
    if context.parent_id not in nodes:  # released: its branches still belong together
        released = Text(f"{_short(context.parent_id)} released", style="dim strike")
        nodes[context.parent_id] = top.add(released)
    return nodes[context.parent_id]


def _line(context: ContextInfo) -> Text:
    line = Text.assemble(
        (_short(context.id), "bold cyan"),
        f"  {context.length:,} tokens",
        (f" from {context.fork_position:,}" if context.parent_id is not None else "", "dim"),
        "  blocks ",
        (f"{context.private_blocks} alone", "yellow"),
        " + ",
        (f"{context.shared_blocks} shared", "green"),
    )
    for mark in _marks(context):
        line.append(f"  {mark}", "bold magenta")
    if context.labels:
        line.append(f"  {_labels(context.labels)}", "italic")
    return line


def _marks(context: ContextInfo) -> list[str]:
    marks = ["busy"] * context.busy + ["pinned"] * context.pinned
    if context.residency is not Residency.DEVICE:
        marks.append(f"KV {context.residency}, {context.num_computed_tokens:,} computed")
    return marks


def _labels(labels: Mapping[str, str]) -> str:
    return " ".join(f"{name}={value}" for name, value in sorted(labels.items()))


def _totals(contexts: Sequence[ContextInfo], pool: PoolInfo) -> Text:
    return Text(
        f"{len(contexts):,} contexts, {sum(context.length for context in contexts):,} tokens; pool "
        f"of {pool.total_blocks:,} blocks: {pool.live_blocks:,} live, {pool.cached_blocks:,} "
        f"cached, {pool.free_blocks:,} free; sharing ratio {sharing_ratio(contexts, pool):.2f}",
        style="bold",
    )


def _short(id: str) -> str:
    return f"…{id[-SHORT:]}"
