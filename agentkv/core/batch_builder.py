"""From what is scheduled to the integers of a Batch; decides nothing.

Rows follow the order of the tree, so that the rows which read a segment are consecutive and the
kernel can read the segment once for all of them.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import repeat

from agentkv.core.batch import NO_SLOT, AdapterRows, Batch, BlockCopy, Run, Sample, Score
from agentkv.core.context_tree import ContextTree
from agentkv.core.request import Request
from agentkv.core.segment import Segment
from agentkv.core.token_counter import TokenCounts


@dataclass(slots=True, eq=False)
class Work:
    """What one step does for one request: rows for the positions [first, upto) of its path."""

    request: Request
    first: int
    upto: int
    copies: tuple[BlockCopy, ...] = ()
    shared: "Work | None" = None
    """Work of a sibling that runs the row this request needs; it has none of its own then."""
    samples: bool = False
    draft: tuple[int, ...] = ()
    """Guessed tokens at the end of its path: its last rows, each sampled after."""
    num_rejected: int = 0
    """Rows it had for guesses that were wrong."""
    keeps_head: bool = False
    """Whether the logits of the last row are kept for whoever continues there."""
    first_row: int = 0
    """Where its rows begin in the Batch."""
    num_scores: int = 0
    """Scores asked for in the Batch."""

    @property
    def num_rows(self) -> int:
        """Rows of its own."""
        return self.upto - self.first

    @property
    def last_row(self) -> int | None:
        """Row with the logits after its last token; None when those were kept earlier."""
        if self.shared is not None:
            return self.shared.last_row
        return self.first_row + self.num_rows - 1 if self.num_rows else None

    @property
    def num_samples(self) -> int:
        """Tokens it chooses: one after its path, and one in the place of each guess."""
        return len(self.draft) + 1 if self.samples else 0


def build_batch(tree: ContextTree, works: list[Work]) -> Batch:
    """Puts works in the order of the tree, and notes in each where its rows are."""
    paths = {work: tree.path(work.request.context.tail) for work in works}
    works.sort(
        key=lambda work: (
            work.request.context.adapter,  # whole trees: nothing is shared between adapters
            [segment.id for segment in paths[work]],
        )
    )
    rows: list[tuple[int, int, int]] = []
    for work in works:
        work.first_row = len(rows)
        rows.extend(_rows(work, paths[work], tree.block_size))
    scores = [_scores(tree, work) for work in works]
    for work, asked in zip(works, scores, strict=True):
        work.num_scores = len(asked)
    return Batch(
        token_ids=tuple(token for token, _, _ in rows),
        positions=tuple(position for _, position, _ in rows),
        slots=tuple(slot for _, _, slot in rows),
        runs=_runs(works, paths),
        copies=tuple(copy for work in works for copy in work.copies),
        samples=tuple(sample for work in works if work.samples for sample in _samples(tree, work)),
        heads=tuple(_head(work) for work in works if work.keeps_head),
        scores=tuple(score for asked in scores for score in asked),
        adapters=_adapters(works),
    )


def _adapters(works: list[Work]) -> tuple[AdapterRows, ...]:
    """Groups the rows that have an adapter; works are in the order of adapters."""
    groups: list[AdapterRows] = []
    for work in works:
        adapter = work.request.context.adapter
        if not adapter or not work.num_rows:
            continue
        if groups and groups[-1].adapter == adapter:
            groups[-1] = groups[-1]._replace(num_rows=groups[-1].num_rows + work.num_rows)
        else:
            groups.append(AdapterRows(adapter, work.first_row, work.num_rows))
    return tuple(groups)


def _rows(work: Work, path: list[Segment], block_size: int) -> Iterator[tuple[int, int, int]]:
    """Yields (token, position, slot) for each row of a work."""
    for segment in path:
        blocks, first_block = segment.blocks, segment.start // block_size
        for position in range(max(segment.start, work.first), min(segment.end, work.upto)):
            slot = NO_SLOT
            if position >= segment.num_computed:
                block_id = blocks[position // block_size - first_block]
                slot = block_id * block_size + position % block_size
            yield segment.tokens[position - segment.start], position, slot


def _runs(works: list[Work], paths: dict[Work, list[Segment]]) -> tuple[Run, ...]:
    """Gathers the segments that rows read; all rows of a work are listed with all its segments.

    A row that lies before a segment reads nothing of it: its own position bounds what it sees.
    """
    runs: dict[Segment, Run] = {}
    for work in works:
        for segment in paths[work] if work.num_rows else ():
            if segment.start >= work.upto:
                break
            known = runs.get(segment)
            if known is None:
                end = max(segment.num_computed, min(segment.end, work.upto))
                known = Run(segment.id, segment.start, end, segment.block_ids, work.first_row, 0)
            assert known.first_row + known.num_rows == work.first_row
            runs[segment] = known._replace(num_rows=known.num_rows + work.num_rows)
    return tuple(runs.values())


def _samples(tree: ContextTree, work: Work) -> Iterator[Sample]:
    """Asks for the token after a path, and before that for those in the places of its draft."""
    request, tail = work.request, work.request.context.tail
    assert request.params is not None
    head = tree.heads.get(tail) if work.last_row is None else None
    assert work.last_row is not None or head is not None
    num_ahead = len(work.draft)
    counts: Iterable[TokenCounts | None] = repeat(None)
    if request.counter is not None:
        counts = request.counter.snapshots(work.draft)
    for number, counted in zip(range(num_ahead + 1), counts, strict=False):
        yield Sample(
            None if work.last_row is None else work.last_row - num_ahead + number,
            head,
            request.params,
            request.stream,
            tail.end - num_ahead + number,
            allowed=request.matcher,
            rules=request.rules_after(number),
            counts=counted,
        )


def _head(work: Work) -> int:
    assert work.last_row is not None
    return work.last_row


def _scores(tree: ContextTree, work: Work) -> list[Score]:
    """Asks for the log-probabilities of given tokens whose logits this step has."""
    request, tail = work.request, work.request.context.tail
    asked: list[Score] = []
    if request.next_scored is None:
        return asked
    first = request.next_scored
    if request.head is not None:
        asked.append(Score(None, request.head, tree.token_at(tail, first)))
        first += 1
    for position in range(first, min(tail.end, work.upto + 1)):
        row = work.first_row + position - 1 - work.first
        asked.append(Score(row, None, tree.token_at(tail, position)))
    return asked
