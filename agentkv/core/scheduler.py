"""Which requests share a step, and who gives way when blocks run short.

`schedule()` plans a step and takes its blocks; `update()` commits what the step computed, and
cannot fail; `roll_back()` undoes a step that did. It knows no model and no text.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from agentkv.config import SchedulerConfig
from agentkv.core.admission import Admission
from agentkv.core.batch import Batch, Sampled, StepResult
from agentkv.core.batch_builder import Work, build_batch
from agentkv.core.block_move import BlockMove, MoveCosts, Place, Tier
from agentkv.core.block_writes import commit_writes, roll_back_writes
from agentkv.core.context import Context
from agentkv.core.context_store import ContextStore
from agentkv.core.drafter import Propose, look_up
from agentkv.core.eviction import forget, move_out
from agentkv.core.lease import LeaseMode
from agentkv.core.request import Event, FinishReason, Request
from agentkv.core.request_queues import RequestQueues
from agentkv.core.segment import Hold
from agentkv.core.speculation import Speculator
from agentkv.core.step_planner import StepPlanner
from agentkv.errors import InternalError, PoolExhausted, Reason


@dataclass(frozen=True, slots=True)
class Step:
    """A planned step: what to compute, for whom, and who was refused on the way."""

    batch: Batch
    works: tuple[Work, ...]
    refused: tuple[Event, ...]
    moves: tuple[BlockMove, ...] = ()
    """Done in order, before the batch's copies and writes."""
    fetches: tuple[Place, ...] = ()
    """Disk blocks to be read ahead; nobody waits for that in this step."""


@dataclass(frozen=True, slots=True)
class SchedulerStatistics:
    """Counts since start."""

    num_steps: int
    computed_tokens: int
    num_block_copies: int
    num_preemptions: int
    num_moved_out: int
    """Blocks that left the device for the host."""
    num_brought_back: int
    """Blocks that came back to the device from a lower tier."""
    num_lost: int
    """Blocks that were to come back and could not be read; their KV is recomputed."""


class Scheduler:
    """Continuous batching over one context tree."""

    def __init__(
        self,
        store: ContextStore,
        config: SchedulerConfig,
        *,
        max_length: int,
        propose: Propose = look_up,
    ) -> None:
        self.queues = RequestQueues(store)
        self._store = store
        self._tree = store.tree
        self._ledger = store.ledger
        self._config = config
        self._max_length = max_length
        self._admission = Admission(store, self.queues, config.watermark)
        self._speculator = Speculator(
            self._tree, self._admission, config, propose, max_length=max_length
        )
        self._parking: dict[Context, None] = {}
        self._num_steps = self._computed = self._num_copies = 0
        self._num_out = self._num_back = self._num_lost = 0

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return bool(self.queues.running or self.queues.waiting or self._parking)

    def statistics(self) -> SchedulerStatistics:
        """Counts since start."""
        return SchedulerStatistics(
            self._num_steps,
            self._computed,
            self._num_copies,
            self.queues.num_preemptions,
            self._num_out,
            self._num_back,
            self._num_lost,
        )

    def require_possible(self, requests: Sequence[Request]) -> None:
        """Makes sure that requests may be queued, whose contexts' tails hold what they were given.

        Raises:
            PoolExhausted: One could not run even with the pool to itself, or too many wait.
        """
        num_waiting, most = len(self.queues.waiting), self._config.max_waiting
        if num_waiting + len(requests) > most:
            could_fit = len(requests) <= most
            raise PoolExhausted(
                f"{num_waiting} requests wait already, at most {most} may, and this call makes "
                f"{len(requests)}. {'Try again later.' if could_fit else 'Ask for fewer at once.'}",
                reason=Reason.QUEUE_FULL,
                metadata={"waiting": num_waiting, "need": len(requests), "limit": most},
                retry_after=1.0 if could_fit else None,
            )
        for request in requests:
            self._admission.require_possible(request)

    def submit(self, requests: Sequence[Request]) -> None:
        """Queues requests that were found possible."""
        for request in requests:
            self.queues.enqueue(request)

    def finish(self, request: Request) -> None:
        """Ends a request early: its context stays at its last committed token."""
        self.queues.finish(request)
        self.park_if_leased(request.context)

    def park_if_leased(self, context: Context) -> None:
        """Lets the KV of an idle context with a PARK lease leave the device at the next step.

        Answers at once. What other contexts keep stays, and so does what the host has no room for
        or what is computed again sooner than carried. Any use of the context brings it back.
        """
        if context.is_released or context.is_hidden:
            return
        is_parked = context.lease.mode is LeaseMode.PARK and context.request is None
        if is_parked and self._tree.lower.takes_blocks:
            self._store.set_hold(context, Hold.TOKENS)
            context.has_given_way = True
            self._parking[context] = None

    def on_fetched(self, places: Sequence[Place]) -> None:
        """Takes in that disk blocks have been read ahead, or cannot be read."""
        self._tree.lower.on_fetched(places)

    def set_costs(self, costs: MoveCosts) -> None:
        """Says what moving and recomputing cost, as measured."""
        self._tree.lower.costs = costs

    def schedule(self) -> Step | None:
        """Plans a step; None when there is nothing to do or to say, or only KV to wait for."""
        self._move_out_parked()
        planner = StepPlanner(self._tree, self.queues, self._admission, self._config)
        planner.make_way()
        planner.place_running()
        planner.admit_waiting()
        works = planner.works
        moves, fetches = self._tree.lower.take_moves(), self._tree.lower.take_fetches()
        if not (works or planner.refused or moves or fetches):
            is_idle = planner.is_fetching or not self.has_work
            assert is_idle, "requests are left, and none can go on"
            return None
        self._speculator.add_drafts(works)
        batch = build_batch(self._tree, works)
        self._num_copies += len(batch.copies)
        self._num_out += sum(move.src.tier is Tier.DEVICE for move in moves)
        self._num_back += sum(move.dst.tier is Tier.DEVICE for move in moves)
        return Step(batch, tuple(works), tuple(planner.refused), moves, fetches)

    def _move_out_parked(self) -> None:
        """Moves out what only parked contexts hold, leaf by leaf."""
        tree, parking = self._tree, list(self._parking)
        self._parking.clear()
        for context in parking:
            if context.is_released or context.request is not None or context.hold > Hold.TOKENS:
                continue
            node = context.tail
            while node.parent is not None and not node.holds[Hold.KV]:
                above = node.parent
                if node.blocks and (node.num_kv_children or not move_out(tree, node)):
                    if tree.is_part(node):
                        break
                    above = context.tail  # joined with another segment meanwhile: look again
                node = above

    def update(self, step: Step, result: StepResult) -> list[Event]:
        """Commits a step that ran; returns what it did for each request."""
        self._num_steps += 1
        self._computed += step.batch.num_rows
        self._tree.pool.unguard()
        heads, scores, samples = iter(result.heads), iter(result.scores), iter(result.samples)
        sampled = {work: [next(samples) for _ in range(work.num_samples)] for work in step.works}
        for work in step.works:
            if work.draft:
                self._speculator.settle(work, sampled[work])
            commit_writes(self._tree, work.request.context.tail, work.upto)
            work.request.computed_tokens += work.num_rows + work.num_rejected
            self._count(work)
            if work.keeps_head:
                self._tree.heads.keep(work.request.context.tail, next(heads))
        events: list[Event] = []
        for work in step.works:
            self._record_scores(work, [next(scores) for _ in range(work.num_scores)])
            if work.samples:
                events += self._commit_tokens(work, sampled[work][: work.num_samples])
            elif work.request.params is None and work.upto == work.request.target:
                context = work.request.context
                self._store.set_length(context, context.tail.end)
                context.rendering = work.request.rendering or context.rendering
                events.append(Event(work.request, finish=FinishReason.LENGTH))
        for event in events:
            if event.finish is not None:
                self.finish(event.request)
        return events

    def abandon(self, step: Step, failed: Sequence[BlockMove]) -> None:
        """Undoes a step before it ran, because KV could not be carried: its requests plan again.

        What was lost is recomputed from tokens; what was written in half is in no segment any more.
        """
        self._tree.pool.unguard()
        for work in step.works:
            request = work.request
            if work.draft:
                self._speculator.retract(work)
            roll_back_writes(self._tree, request.context.tail, work.copies)
            if not request.computed_tokens and not request.generated_tokens:
                request.cached_tokens = None
        self._num_lost += len(failed)
        forget(self._tree, [move.dst for move in failed])

    def roll_back(self, step: Step) -> list[Event]:
        """Undoes a step that raised: its requests end, all others go on."""
        self._tree.pool.unguard()
        for work in step.works:
            roll_back_writes(self._tree, work.request.context.tail, work.copies)
        events = []
        for work in step.works:
            self.finish(work.request)
            error = InternalError(
                "The step that computed this request failed; its context is unchanged since the "
                "last committed token. Try again.",
                reason=Reason.ENGINE_STEP_FAILED,
            )
            events.append(Event(work.request, finish=FinishReason.ERROR, error=error))
        return events

    def _count(self, work: Work) -> None:
        context = work.request.context
        self._ledger.count_reuse(context, work.request.cached_tokens or 0)
        self._ledger.count_rows(context, work.first, work.upto, len(work.copies))
        context.bill.computed_tokens += work.num_rejected

    def _record_scores(self, work: Work, logprobs: list[float]) -> None:
        request = work.request
        if request.next_scored is not None:
            request.logprobs.extend(logprobs)
            request.next_scored += len(logprobs)
            request.head = None

    def _commit_tokens(self, work: Work, sampled: list[Sampled]) -> list[Event]:
        """Commits the guesses that were right, which are on the path, and what comes after them.

        That is one more token, and behind it those that a constraint leaves no choice about.
        """
        events = [
            self._commit_sampled(work.request, each, is_there=number < len(work.draft))
            for number, each in enumerate(sampled)
        ]
        events += self._commit_forced(events.pop())
        num_tokens = sum(event.token is not None for event in events)
        return [
            event._replace(num_later=max(0, num_tokens - 1 - number))
            for number, event in enumerate(events)
        ]

    def _commit_sampled(self, request: Request, sampled: Sampled, *, is_there: bool) -> Event:
        matcher = request.matcher
        if matcher is not None and matcher.error is not None:
            return Event(request, finish=FinishReason.ERROR, error=matcher.error)
        if matcher is not None and sampled.is_stuck:
            return Event(request, finish=FinishReason.DEAD_END)
        if sampled.failed:
            fault = InternalError(
                "The model's logits for this sequence are not finite numbers.",
                reason=Reason.ENGINE_STEP_FAILED,
            )
            return Event(request, finish=FinishReason.ERROR, error=fault)
        finish = self._commit_token(request, sampled.token, is_there=is_there)
        return Event(request, sampled.token, sampled.logprob, finish, top=sampled.top)

    def _commit_forced(self, chosen: Event) -> list[Event]:
        """Tells a constraint the token just committed, and commits those that must follow it."""
        request, matcher = chosen.request, chosen.request.matcher
        if matcher is None or chosen.token is None or chosen.token in request.end_token_ids:
            return [chosen]
        assert request.params is not None
        num_left = request.params.max_tokens - request.generated_tokens
        limit = min(num_left, self._max_length - request.context.length)
        events = [chosen]
        for token in matcher.advance(chosen.token, limit):
            finish = self._commit_token(request, token, is_there=False)
            events.append(Event(request, token, finish=finish))
            if token in request.end_token_ids:
                return events
        last = events.pop()
        if matcher.is_complete and matcher.error is None:
            last = last._replace(finish=FinishReason.STOP)
        elif last.finish is None and matcher.error is not None:
            last = last._replace(finish=FinishReason.ERROR, error=matcher.error)
        return [*events, last]

    def _commit_token(self, request: Request, token: int, *, is_there: bool) -> FinishReason | None:
        """Commits one token; returns why generation ends there, if it does."""
        context, params = request.context, request.params
        assert params is not None
        if not is_there:
            context.tail = self._tree.append(context.tail, (token,), context.hold)
        self._store.set_length(context, context.length + 1)
        request.generated_tokens += 1
        context.bill.generated_tokens += 1
        if request.counter is not None:
            request.counter.add(token)
        if token in request.end_token_ids:
            return FinishReason.STOP
        if request.generated_tokens >= params.max_tokens or context.length >= self._max_length:
            return FinishReason.LENGTH
        return None
