"""A test bench: an engine on a fake model, an audit of the KV behind it, and short verbs.

The audit compares every slot that the bookkeeping says is computed with what the fake model put
there, and poisons what is free; it runs after every verb and every step.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any, TypeVar

from fakes import (
    ContractBroken,
    FakeModelRunner,
    Kv,
    digest,
    digest_one,
    make_engine,
    make_tokenizer,
)

from agentkv.config import LeaseConfig, LimitsConfig, QuotasConfig, SchedulerConfig
from agentkv.core.drafter import Propose, look_up
from agentkv.core.lease import LeaseMode, LeaseTerms
from agentkv.core.segment import Segment
from agentkv.core.views import ContextView, PoolView, Usage
from agentkv.engine.operations import Generation, Operation
from agentkv.engine.outputs import Chunk, Committed, Finish, Released, Scores, Update
from agentkv.engine.tokenizer import Tokenizer
from agentkv.sampling_params import SamplingParams

TENANT = "tenant"
PARK = LeaseTerms(LeaseMode.PARK)
PINNED = LeaseTerms(LeaseMode.PIN)
RETAINED = LeaseTerms()

OperationT = TypeVar("OperationT", bound=Operation)


@cache
def shared_tokenizer() -> Tokenizer:
    """A tokenizer of numbers; it has no state, and takes a while to build."""
    return make_tokenizer()


class Bench:
    """One engine under test, used by one tenant."""

    def __init__(
        self,
        num_blocks: int = 256,
        block_size: int = 16,
        *,
        host_blocks: int = 0,
        disk_blocks: int = 0,
        chunk: int = 256,
        budget: int = 512,
        watermark: int = 0,
        max_waiting: int = 4096,
        max_running: int = 256,
        max_length: int = 4096,
        limits: LimitsConfig | None = None,
        leases: LeaseConfig | None = None,
        quotas: QuotasConfig | None = None,
        end_token_ids: Sequence[int] = (),
        pieces: Sequence[str] = (),
        tokenizer: Tokenizer | None = None,
        draft: int = 0,
        propose: Propose = look_up,
    ) -> None:
        self.now = 1000.0
        """Seconds, as the engine's timer shows them; a test moves them on."""
        self.block_size = block_size
        self.now = 1000.0
        """Seconds since the epoch, for the engine."""
        self.runner = FakeModelRunner(num_blocks, block_size)
        self.engine = make_engine(
            self.runner,
            num_blocks=num_blocks,
            block_size=block_size,
            host_blocks=host_blocks,
            disk_blocks=disk_blocks,
            max_length=max_length,
            scheduler=SchedulerConfig(
                token_budget=budget,
                chunk_size=chunk,
                watermark=watermark,
                max_waiting=max_waiting,
                max_running=max_running,
                num_speculative_tokens=draft,
            ),
            limits=limits,
            leases=leases,
            clock=lambda: self.now,
            quotas=quotas,
            end_token_ids=end_token_ids,
            tokenizer=tokenizer or (make_tokenizer(pieces) if pieces else shared_tokenizer()),
            timer=lambda: self.now,
            propose=propose,
        )
        self.tree = self.engine._tree
        self.pool = self.tree.pool

    # -- verbs -------------------------------------------------------------------------------

    def create(self, tokens: Sequence[int], *, pinned: bool = False) -> str:
        """Creates a context and computes it."""
        return self.created(tokens, pinned=pinned).context.id

    def created(self, tokens: Sequence[int], *, pinned: bool = False) -> Committed:
        """Creates a context; returns the whole answer."""
        lease = PINNED if pinned else RETAINED
        return self.run(self.engine.contexts.create(TENANT, tokens, lease=lease)).answer

    def fork(self, context_id: str, count: int = 1, at: int | None = None) -> list[str]:
        """Forks; no step is run."""
        views = self.engine.contexts.fork(TENANT, context_id, count=count, at=at)
        self.audit()
        return [view.id for view in views]

    def extend(self, context_id: str, tokens: Sequence[int]) -> Committed:
        """Extends and computes."""
        return self.run(self.engine.contexts.extend(TENANT, context_id, tokens)).answer

    def start(self, context_id: str, max_tokens: int, **options: Any) -> Generation:
        """Begins to generate; no step is run."""
        params = SamplingParams(max_tokens=max_tokens, **options)
        return self.engine.inference.generate(TENANT, context_id, params)

    def generate(self, context_id: str, max_tokens: int, **options: Any) -> list[int]:
        """Generates to the end; returns the tokens."""
        return tokens_of(self.finish(self.start(context_id, max_tokens, **options)))

    def usage(self, context_id: str, max_tokens: int) -> Usage:
        """Generates to the end; returns what that took."""
        return finish_of(self.finish(self.start(context_id, max_tokens))).usage

    def score(self, context_id: str, continuations: Sequence[Sequence[int]]) -> Scores:
        """Scores continuations."""
        return self.run(self.engine.inference.score(TENANT, context_id, continuations)).answer

    def truncate(self, context_id: str, length: int) -> ContextView:
        """Truncates."""
        view = self.engine.contexts.truncate(TENANT, context_id, length)
        self.audit()
        return view

    def release(self, *context_ids: str, recursive: bool = False) -> Released:
        """Releases."""
        released, _ = self.engine.contexts.release(TENANT, context_ids, recursive=recursive)
        self.audit()
        return released

    def park(self, context_id: str) -> ContextView:
        """Parks a context and lets its KV leave."""
        self.engine.contexts.update_lease(TENANT, context_id, PARK)
        self.step()
        return self.view(context_id)

    # -- the loop ----------------------------------------------------------------------------

    def step(self) -> Sequence[Operation]:
        """Runs one step and the audit."""
        try:
            touched = self.engine.step()
        except ContractBroken as error:
            raise AssertionError(str(error)) from error
        self.audit()
        return touched

    def steps(self, count: int) -> None:
        """Runs some steps."""
        for _ in range(count):
            self.step()

    def run(self, operation: OperationT) -> OperationT:
        """Steps until an operation is done; raises its error."""
        for _ in range(10_000):
            if operation.is_done:
                break
            self.step()
        assert operation.is_done, "no progress"
        self.audit()
        if operation.error is not None:
            raise operation.error
        return operation

    def finish(self, *operations: Generation) -> list[Update]:
        """Steps until all are done, whatever becomes of them; returns what they had to say."""
        news: list[Update] = []
        for _ in range(10_000):
            for operation in operations:
                news.extend(operation.take_news())
            if all(operation.is_done for operation in operations):
                return news
            self.step()
        raise AssertionError("no progress")

    def drain(self) -> None:
        """Steps until nothing is left to do."""
        for _ in range(10_000):
            if not self.engine.has_work:
                return
            self.step()
        raise AssertionError("no progress")

    def end(self) -> None:
        """Releases and flushes everything: the pool must be whole and the tree empty."""
        self.drain()
        page = self.engine.observer.list(TENANT, page_size=100_000)
        self.release(*(view.id for view in page.contexts))
        self.engine.flush_cache()
        self.audit()
        assert self.pool_view.free == self.pool_view.total, "blocks leaked"
        for tier in (self.pool_view.host, self.pool_view.disk):
            assert tier.free == tier.total, "blocks of a lower tier leaked"
        assert not list(self.tree), "segments leaked"
        assert len(self.tree.heads) == 0, "logits leaked"

    # -- what is there -----------------------------------------------------------------------

    @property
    def pool_view(self) -> PoolView:
        """The pool as observers see it."""
        return self.engine.observer.pool()

    @property
    def live(self) -> int:
        """Blocks held by contexts."""
        return self.pool_view.live

    @property
    def free(self) -> int:
        """Free blocks."""
        return self.pool_view.free

    @property
    def num_copies(self) -> int:
        """Blocks copied since start."""
        return self.engine.view().num_block_copies

    def view(self, context_id: str) -> ContextView:
        """The context as its owner sees it."""
        return self.engine.observer.get(TENANT, context_id)

    def length(self, context_id: str) -> int:
        """Committed tokens."""
        return self.view(context_id).length

    def tokens(self, context_id: str) -> list[int]:
        """The committed tokens of a context."""
        return list(self.engine.observer.tokens(TENANT, context_id))

    def blocks(self, context_id: str) -> list[int]:
        """The blocks along a context's path, each once, in order."""
        path = self.tree.path(self.engine._store.get(TENANT, context_id).tail)
        return list(dict.fromkeys(block for segment in path for block in segment.blocks))

    def forget_logits(self, context_id: str) -> None:
        """Drops the logits at a context's head, as pressure on them would."""
        self.tree.heads.drop(self.engine._store.get(TENANT, context_id).tail)

    def content(self, context_id: str) -> list[tuple[Kv | None, ...]]:
        """The KV in a context's blocks."""
        return [self.runner.block(block_id) for block_id in self.blocks(context_id)]

    def audit(self) -> None:
        """Checks every invariant, and every computed token against its slot."""
        self.engine.check()
        view, size = self.pool_view, self.block_size
        assert view.free + view.live + view.cached == view.total
        assert 0 <= view.pinned <= view.live
        digests: dict[Segment, int] = {}
        for segment in self.tree:
            assert segment.parent is not None
            folded = digests.get(segment.parent, 0)
            for offset in range(segment.num_computed - segment.start):
                position, token = segment.start + offset, segment.tokens[offset]
                folded = digest_one(token, folded)
                block_id = segment.blocks[position // size - segment.start // size]
                kv = self.runner.slots[block_id * size + position % size]
                assert kv == Kv(token, position, folded), f"{segment}: {kv} at {position}"
            for position in range(segment.num_computed, segment.num_kept):
                token = segment.tokens[position - segment.start]
                folded = digest_one(token, folded)
                place = segment.away[position // size - segment.num_computed // size]
                kv = self.runner.places[place][position % size]
                assert kv == Kv(token, position, folded), f"{segment}: {kv} at {position}, away"
            digests[segment] = digest(segment.tokens[segment.num_kept - segment.start :], folded)
        self.runner.poison([b for b in range(view.total) if self.pool.count(b) == 0])


def tokens_of(updates: Sequence[Update], branch: int = 0) -> list[int]:
    """The tokens of one branch of a stream."""
    chunks = [update for update in updates if isinstance(update, Chunk)]
    return [token for chunk in chunks if chunk.branch == branch for token in chunk.token_ids]


def text_of(updates: Sequence[Update], branch: int = 0) -> str:
    """The text of one branch of a stream."""
    chunks = [update for update in updates if isinstance(update, Chunk)]
    return "".join(chunk.text for chunk in chunks if chunk.branch == branch)


def finish_of(updates: Sequence[Update], branch: int = 0) -> Finish:
    """The end of one branch of a stream; there must be exactly one."""
    ends = [update for update in updates if isinstance(update, Finish)]
    (end,) = [update for update in ends if update.branch == branch]
    return end


def numbers(seed: int, count: int) -> list[int]:
    """Tokens that differ from those of any other seed, from the first block on."""
    return [digest([seed, position]) % 1000 for position in range(count)]
