"""Drafts in a step: guessed tokens as further rows of a branch, and what becomes of them.

    schedule   after everybody has their place: rows and free blocks that nobody else wants carry
               drafts; nothing gives way to one
    run        row by row the token after each is sampled, as it would be without a draft
    update     guesses that equal what was sampled stay; the rest is cut off with its blocks before
               anything of it could be matched, forked or read

A draft exists within one step only. With each row sampled from its own position's stream, and by
the rules that hold there, the tokens are those of the same branch without drafts.
"""

from collections.abc import Sequence

from agentkv.config import SchedulerConfig
from agentkv.core.admission import Admission
from agentkv.core.batch import Sampled
from agentkv.core.batch_builder import Work
from agentkv.core.context_tree import ContextTree
from agentkv.core.drafter import LOOKBACK, Propose
from agentkv.core.request import Request


class Speculator:
    """Adds drafts to a planned step, and settles them when it has run."""

    def __init__(
        self,
        tree: ContextTree,
        admission: Admission,
        config: SchedulerConfig,
        propose: Propose,
        *,
        max_length: int,
    ) -> None:
        self._tree = tree
        self._admission = admission
        self._config = config
        self._propose = propose
        self._max_length = max_length

    def add_drafts(self, works: Sequence[Work]) -> None:
        """Lets branches that decode guess ahead, where rows and blocks are left over."""
        num_rows = sum(work.num_rows for work in works)
        spare = self._config.token_budget - num_rows
        drafting = [work for work in works if _may_draft(work)]
        for number, work in enumerate(drafting):
            share = spare // (len(drafting) - number)
            if share > 0:
                self._draft(work, share, num_rows)
                spare -= len(work.draft)

    def settle(self, work: Work, sampled: Sequence[Sampled]) -> None:
        """Keeps of a draft what equals the sampled tokens, and cuts off the rest."""
        request, draft = work.request, work.draft
        assert request.drafter is not None and len(sampled) == len(draft) + 1
        pairs = enumerate(zip(draft, sampled, strict=False))
        num_right = next(
            (n for n, (guess, each) in pairs if each.failed or each.token != guess), len(draft)
        )
        request.drafter.record(len(draft), num_right)
        request.drafted_tokens += len(draft)
        request.accepted_tokens += num_right
        self.retract(work, num_right)

    def retract(self, work: Work, num_kept: int = 0) -> None:
        """Takes a draft back but for its first tokens: their rows' blocks, and the tokens."""
        tree, tail = self._tree, work.request.context.tail
        work.num_rejected += len(work.draft) - num_kept
        work.upto -= len(work.draft) - num_kept
        work.draft = work.draft[:num_kept]
        del tail.tokens[work.upto - tail.start :]
        num_blocks = -(-work.upto // tree.block_size) - tail.start // tree.block_size
        if num_blocks < len(tail.blocks):
            tree.residency.shrink(tail, num_blocks)

    def _draft(self, work: Work, limit: int, num_rows: int) -> None:
        request, tail = work.request, work.request.context.tail
        assert request.params is not None and request.drafter is not None
        limit = min(
            limit,
            request.drafter.length(num_rows, self._config.fixed_rows),
            request.params.max_tokens - request.generated_tokens - 1,
            self._max_length - tail.end - 1,
        )
        if limit <= 0:
            return
        guesses = self._propose(self._tree.last_tokens(tail, LOOKBACK), limit)
        ends = (n for n, token in enumerate(guesses) if token in request.end_token_ids)
        guesses = guesses[: next(ends, len(guesses))]  # nothing follows an end
        draft = tuple(guesses[: self._room(request, len(guesses))])
        if draft:
            assert not tail.is_sealed
            self._tree.append(tail, draft, request.context.hold)
            work.draft, work.upto = draft, work.upto + len(draft)

    def _room(self, request: Request, wanted: int) -> int:
        """Takes free blocks for a draft if need be; says how many of its tokens have slots."""
        tree, tail = self._tree, request.context.tail
        listed = tail.start // tree.block_size + len(tail.blocks)
        beyond = tail.end + wanted - listed * tree.block_size
        num_blocks = max(0, -(-beyond // tree.block_size))
        if num_blocks > tree.pool.num_free or not self._admission.is_within_quota(
            request, num_blocks
        ):
            return min(wanted, listed * tree.block_size - tail.end)
        if num_blocks:
            tree.residency.grow(tail, tree.pool.allocate(num_blocks))
        return wanted


def _may_draft(work: Work) -> bool:
    """Whether a work is one row of decoding on a tail that nothing else counts on.

    That row must be written: then its block is the tail's alone, and so may be what follows it. A
    row that runs for its logits only says nothing about who else lists the block. A constraint
    runs ahead by itself, and its masks are for the next token alone.
    """
    request, tail = work.request, work.request.context.tail
    if request.drafter is None or not work.samples or work.num_rows != 1:
        return False
    if request.matcher is not None:
        return False
    return not (tail.is_sealed or tail.is_computed)
