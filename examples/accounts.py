"""What the examples count: every context, what a resend would compute, the blocks at the peak.

It knows contexts, tokens and blocks, no message and no connection: `watching.py` feeds it.
"""

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from tree_drawing import Drawn, draw

from agentkv import Client, ContextHandle, ContextInfo, PoolInfo


class Blocks(NamedTuple):
    """Blocks at one moment."""

    unshared: int = 0
    """What the living contexts would hold if each had its own copy of everything."""
    held: int = 0
    """What the server's pool held for them, and for other clients if it had any."""


@dataclass
class Resend:
    """Tokens that a server without contexts would compute for the same results.

    Each generation and each scored text sends its whole path again, and every token of that is
    computed but the last, after which nothing is asked. Making, forking and extending contexts
    costs such a server nothing.
    """

    num_tokens: int = 0
    """Computed by a server that keeps nothing between calls."""
    num_missed_tokens: int = 0
    """Computed by one with a prefix cache that never forgets: the best such a cache can do."""
    cached: set[int] = field(default_factory=set)
    """The last node of every block in that cache. Only whole blocks are cached."""

    def call(self, path: Sequence[int], num_sent: int, block_size: int) -> None:
        """Counts one call.

        Args:
            path: Nodes of what was sent and of what came of it.
            num_sent: Tokens sent.
            block_size: Tokens of a block.
        """
        num_computed = len(path) - 1
        ends = path[block_size - 1 : num_computed : block_size]
        limit = (num_sent - 1) // block_size  # the last token sent is computed in any case
        num_hits = next((i for i, end in enumerate(ends[:limit]) if end not in self.cached), limit)
        self.num_tokens += num_computed
        self.num_missed_tokens += num_computed - num_hits * block_size
        self.cached.update(ends)


@dataclass
class Watched:
    """One context, living or released."""

    parent_id: str | None
    fork_position: int
    path: list[int]
    """A node for each token: two contexts agree on it as long as all tokens so far agree."""
    num_computed_tokens: int = 0
    is_released: bool = False
    note: str = ""


class Accounts:
    """Counts for one client, from its first call on."""

    def __init__(self) -> None:
        self._contexts: dict[str, Watched] = {}
        self._nodes: dict[tuple[int, Hashable], int] = {}
        self._resend = Resend()
        self._peak = Blocks()
        self._block_size = 1
        self._num_found = 0

    def note(self, context: ContextHandle, text: str) -> None:
        """Notes a few words to stand beside a context in the tree."""
        self._contexts[context.id].note = text

    def report(self, client: Client) -> None:
        """Prints the tree as it is now, and the totals so far."""
        alive = {context.id: context for context in client.list()}
        tree = {
            id: Drawn(it.parent_id, it.fork_position, len(it.path), it.note, alive.get(id))
            for id, it in self._contexts.items()
        }
        computed, found, held = client.usage.computed_tokens, self._num_found, self._peak.held
        print("\nContexts", *draw(tree), sep="\n")
        print("\nTokens computed")
        _print("by the server, for all calls", computed)
        if found:
            _print("found, from an earlier run", found)
        _print("if each call resent its path", self._resend.num_tokens, computed + found)
        _print("the same, with a prefix cache", self._resend.num_missed_tokens, computed + found)
        print("Blocks held, when there were most")
        _print("by the server", held)
        _print("if nothing were shared", self._peak.unshared, held)

    def see(self, context: ContextInfo) -> None:
        """Takes in a context as an answer shows it; a new one has its parent's first tokens."""
        if context.id not in self._contexts:
            parent = self._contexts.get(context.parent_id or "")
            path = parent.path[: context.fork_position] if parent else []
            self._contexts[context.id] = Watched(context.parent_id, context.fork_position, path)
        watched = self._contexts[context.id]
        watched.num_computed_tokens = context.num_computed_tokens
        del watched.path[context.length :]

    def append(self, id: str, tokens: Iterable[Hashable]) -> None:
        """Appends tokens to the path of a context."""
        self._contexts[id].path = self._grown(self._contexts[id].path, tokens)

    def length(self, id: str) -> int:
        """Returns the tokens on the path of a context."""
        return len(self._contexts[id].path)

    def count_found(self, num_tokens: int) -> None:
        """Counts tokens of a created context whose KV was there: not a saving of this run."""
        self._num_found += num_tokens

    def count_generation(self, id: str, num_generated: int) -> None:
        """Counts a generation whose tokens were appended."""
        path = self._contexts[id].path
        self._resend.call(path, len(path) - num_generated, self._block_size)

    def count_scores(self, id: str, continuations: Iterable[Iterable[int]]) -> None:
        """Counts continuations that were scored in one call; the context stays as it is."""
        path = self._contexts[id].path
        whole = [self._grown(path, token_ids) for token_ids in continuations]
        # One pass tells the probability of every next token: texts that differ only there are one.
        for scored in {tuple(scored[:-1]): scored for scored in whole}.values():
            self._resend.call(scored, len(scored), self._block_size)

    def release(self, ids: Iterable[str], *, recursive: bool) -> None:
        """Notes that contexts are gone, with all below them when `recursive`."""
        gone = set(ids)
        for id, watched in self._contexts.items():  # parents first
            if recursive and watched.parent_id in gone:
                gone.add(id)
            watched.is_released |= id in gone

    def measure(self, pool: PoolInfo) -> None:
        """Compares blocks held with blocks without sharing, and keeps the moment of most."""
        self._block_size = size = pool.block_size
        living = [watched for watched in self._contexts.values() if not watched.is_released]
        unshared = sum(-(-watched.num_computed_tokens // size) for watched in living)
        self._peak = max(self._peak, Blocks(unshared, pool.live_blocks))

    def _grown(self, path: Sequence[int], tokens: Iterable[Hashable]) -> list[int]:
        grown = list(path)
        for token in tokens:
            edge = (grown[-1] if grown else -1, token)
            grown.append(self._nodes.setdefault(edge, len(self._nodes)))
        return grown


def _print(what: str, number: int, base: int | None = None) -> None:
    times = "" if base is None else f"   {number / base:.1f} x"
    print(f"  {what:<30} {number:>8,}{times}")
