"""The loop: requests in, steps, events out to the operations they belong to."""

import logging
import time
from collections.abc import Callable, Sequence

from agentkv.core.context_store import ContextStore
from agentkv.core.disk_statistics import DiskStatistics
from agentkv.core.request import Event, FinishReason, Request, RequestStatus
from agentkv.core.scheduler import Scheduler, Step
from agentkv.engine.cost_meter import CostMeter
from agentkv.engine.grammar import GrammarMatcher
from agentkv.engine.mask_maker import MaskMaker
from agentkv.engine.operations import Operation
from agentkv.engine.runner import Mover, Runner
from agentkv.errors import NotFound, Reason

FETCH_WAIT = 0.05
"""Seconds that an otherwise idle loop waits for the disk before it looks for other work again."""
_log = logging.getLogger(__name__)


class StepLoop:
    """Scheduler, runner, and which operation each open request belongs to.

    Invariants: a request is known here from its submission to its last event; a step that raises
    ends the requests it computed and no others.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        store: ContextStore,
        tick: Callable[[], None] = lambda: None,
        *,
        mover: Mover | None = None,
        timer: Callable[[], float] = time.monotonic,
    ) -> None:
        self.scheduler = scheduler
        self._runner = runner
        self._store = store
        self._masks = MaskMaker()
        self._tick = tick
        self._mover = mover
        self._costs = CostMeter(timer)
        self._operations: dict[Request, Operation] = {}

    def require_possible(self, operation: Operation) -> None:
        """Makes sure that all requests of an operation may be queued.

        Raises:
            PoolExhausted: One of them could never run, or too many requests wait.
        """
        self.scheduler.require_possible(operation.requests)

    def submit(self, operation: Operation) -> None:
        """Queues all requests of an operation that was found possible."""
        self.scheduler.submit(operation.requests)
        self._operations.update(dict.fromkeys(operation.requests, operation))

    def step(self, meanwhile: Callable[[], None]) -> list[Operation]:
        """Runs one step; returns the operations that have news.

        Args:
            meanwhile: Called once, unless the batch fails before: while it is computed, as the
                runner says, or at once where there is none to compute.
        """
        self._tick()
        self._take_in_fetched(0)
        step = self.scheduler.schedule()
        if step is None:
            meanwhile()
            if self.scheduler.has_work:  # all that is left waits for the disk
                self._take_in_fetched(FETCH_WAIT)
            return []
        events = list(step.refused)
        if step.fetches and self._mover is not None:
            self._mover.fetch(step.fetches)
        has_moved = not step.moves or self._move(step)
        if not (has_moved and step.works):
            meanwhile()
        else:
            allowed = [sample.allowed for sample in step.batch.samples]
            self._masks.begin([item for item in allowed if isinstance(item, GrammarMatcher)])
            try:
                with self._costs.computing(step.batch.num_rows):
                    result = self._runner.run(step.batch, meanwhile)
            except Exception:
                _log.exception("a step of %d rows failed", step.batch.num_rows)
                self._tick()
                events += self.scheduler.roll_back(step)
            else:
                self._tick()
                events += self.scheduler.update(step, result)
        return self._dispatch(events)

    def end(self, request: Request, num_dropped: int = 0) -> None:
        """Ends a request early; its operation knows why.

        Args:
            request: One that is known here.
            num_dropped: Tokens to take back: those that a step committed after its end.
        """
        self._operations.pop(request, None)
        if request.status is not RequestStatus.DONE:  # else the step has ended it
            self.scheduler.finish(request)
        if num_dropped:
            request.generated_tokens -= num_dropped
            request.context.bill.generated_tokens -= num_dropped
            self._store.truncate(request.context, request.context.length - num_dropped)

    def disk_statistics(self) -> DiskStatistics | None:
        """Counts what the disk tier has done; None when there is none."""
        return None if self._mover is None else self._mover.disk_statistics()

    def close(self) -> None:
        """Closes the mover."""
        if self._mover is not None:
            self._mover.close()

    def _take_in_fetched(self, wait: float) -> None:
        if self._mover is not None:
            self.scheduler.on_fetched(self._mover.fetched(wait))

    def _move(self, step: Step) -> bool:
        """Carries KV between tiers before a step; a step that misses some of it is abandoned."""
        assert self._mover is not None
        with self._costs.moving(len(step.moves)):
            failed = self._mover.move(step.moves)
        if failed:
            _log.warning("%d blocks of KV could not be carried, and are recomputed", len(failed))
            self.scheduler.abandon(step, failed)
        self.scheduler.set_costs(self._costs.costs())
        return not failed

    def end_released(self, request: Request) -> Operation:
        """Ends a request whose context is about to be released: release wins."""
        operation = self._operations[request]
        self.end(request)
        error = NotFound(
            "The context was released while a request ran on it.", reason=Reason.CONTEXT_RELEASED
        )
        operation.on_event(Event(request, finish=FinishReason.ERROR, error=error))
        self._clean_up(operation)
        return operation

    def cancel(self, operation: Operation) -> None:
        """Ends what still runs of an operation; contexts stay at their last committed token."""
        for request in operation.requests:
            if request in self._operations:
                self.end(request)
        self._clean_up(operation)

    def _dispatch(self, events: Sequence[Event]) -> list[Operation]:
        touched: dict[Operation, None] = {}
        for event in events:
            if event.request not in self._operations:
                continue  # a token before this one ended it
            operation = self._operations[event.request]
            if event.finish is not None:
                del self._operations[event.request]
            operation.on_event(event)
            touched[operation] = None
        for operation in touched:
            self._clean_up(operation)
        return list(touched)

    def _clean_up(self, operation: Operation) -> None:
        if operation.is_done:
            for context in operation.leftovers:
                if not context.is_released:
                    self._store.release(context)
