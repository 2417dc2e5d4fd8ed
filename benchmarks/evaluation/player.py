"""Plays sessions against an engine under a policy, on a clock that steps move.

Owns the life of a call: it arrives, gets its memory, runs, ends. Time passes only in steps and,
when nothing runs, up to the next arrival; so a run takes the time of its work, simulated or real.
"""

import heapq
import itertools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from agentkv.engine.engine import Engine
from agentkv.engine.operations import Commit, Generation, Operation
from agentkv.engine.outputs import Chunk, EngineView, Finish
from agentkv.errors import PoolExhausted
from benchmarks.evaluation.contexts import Contexts
from benchmarks.evaluation.meters import Meter
from benchmarks.evaluation.policies import ContiguousPool, Extent, Policy, blocks_for
from benchmarks.evaluation.simulated_step import Clock
from benchmarks.evaluation.traces import Script, Turn

RETRY = 1.0
"""Seconds after which a refused call is tried again."""


@dataclass(eq=False, slots=True)
class Session:
    """One agent, at some point of its script."""

    script: Script
    on_end: Callable[[], None]
    next_turn: int = 0
    tokens: list[int] = field(default_factory=list)
    """Of its context, as far as it is known."""
    contexts: list[str] = field(default_factory=list)
    """Handles, the one that lives on first; empty when the KV was given up."""
    num_helpers: int = 0
    """Sub-agents it waits for."""
    extents: tuple[Extent, ...] = ()

    @property
    def turn(self) -> Turn:
        """The turn that comes or runs."""
        return self.script.turns[self.next_turn]


@dataclass(eq=False, slots=True)
class Call:
    """One turn of one session, from its arrival to its last token."""

    session: Session
    arrived: float
    num_committing: int = 0
    """Contexts whose given tokens are not computed yet."""
    num_generating: int = 0
    last_token: dict[object, float] = field(default_factory=dict)
    """When each branch had its last token."""
    first: Generation | None = None
    """The stream of the branch that lives on."""
    answer: list[int] = field(default_factory=list)
    """Tokens of the branch that lives on."""
    has_failed: bool = False


class Player:
    """Sessions, the engine they call, and the gate before it."""

    def __init__(
        self, engine: Engine, clock: Clock, policy: Policy, meter: Meter, *, longest: int
    ) -> None:
        self.meter = meter
        self._engine = engine
        self._clock = clock
        self._policy = policy
        self._longest = longest
        view = engine.observer.pool()
        self._block_size = view.block_size
        self._reserved = ContiguousPool(view.total) if policy.reserve else None
        self._contexts = Contexts(engine, policy)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._waiting: deque[Call] = deque()
        self._active: list[Call] = []
        self._put_back: list[Call] = []
        self._over: list[Call] = []
        self._calls: dict[Operation, Call] = {}
        self.peak_active = 0

    # -- time --------------------------------------------------------------------------------

    def start(self, at: float, script: Script, on_end: Callable[[], None] = lambda: None) -> None:
        """Has a session begin at a time."""
        session = Session(script, on_end)
        self._at(at, lambda: self._arrive(session))

    def run(self, until: float = float("inf"), patience: float = float("inf")) -> bool:
        """Plays until a time, or until nothing is left to do.

        Returns:
            Whether it went that far: False when a call waited longer than `patience` seconds, or
            nothing can go on.
        """
        while self._clock.now < until:
            self._fire()
            if self._waiting and self._clock.now - self._waiting[0].arrived > patience:
                return False
            if self._engine.has_work:
                self._step()
            elif self._events:
                self._idle(min(until, self._events[0][0]))
            else:
                return not self._waiting
        return True

    def count_waiting(self) -> None:
        """Counts the waits of calls that have no token yet, as long as they are by now."""
        for call in (*self._waiting, *self._active, *self._put_back):
            if not call.last_token and call.arrived >= self.meter.since:
                self.meter.first_tokens.append(self._clock.now - call.arrived)

    @property
    def num_reserved(self) -> int:
        """Blocks that reservations have now; 0 where nothing is reserved."""
        return self._reserved.num_blocks - self._reserved.num_free if self._reserved else 0

    def view(self) -> EngineView:
        """Describes the engine."""
        return self._engine.view()

    def _at(self, time: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._events, (time, next(self._numbers), action))

    def _fire(self) -> None:
        while self._events and self._events[0][0] <= self._clock.now:
            heapq.heappop(self._events)[2]()

    def _idle(self, until: float) -> None:
        start, self._clock.now = self._clock.now, max(self._clock.now, until)
        self._measure(start)

    def _step(self) -> None:
        start = self._clock.now
        for operation in self._engine.step():
            self._take_news(operation)
        self._measure(start)

    def _measure(self, start: float) -> None:
        taken = self.num_reserved if self._reserved is not None else None
        self.meter.pool(start, self._clock.now, self._engine.observer.pool(), taken)

    # -- the gate ----------------------------------------------------------------------------

    def _arrive(self, session: Session) -> None:
        self._waiting.append(Call(session, self._clock.now))
        self._let_in()

    def _let_in(self) -> None:
        """Lets calls in, in order, while their memory can be had."""
        if self._policy.by_request and self._active:
            return
        while self._waiting:
            call = self._waiting[0]
            if not self._reserve(call.session):
                return
            self._waiting.popleft()
            self._active.append(call)
            self.peak_active = max(self.peak_active, len(self._active))
            self._begin(call)

    def _reserve(self, session: Session) -> bool:
        """Takes room for every branch, in one piece each; a held session has it for its life."""
        if self._reserved is None or self._policy.reserve is None or session.extents:
            return True
        turn, is_held = session.turn, self._contexts.keeps
        length = session.script.longest if is_held else turn.length
        tokens = self._policy.reserve.tokens(length, self._longest)
        size = blocks_for(tokens, self._block_size)
        session.extents = self._reserved.reserve_all([size] * turn.branches) or ()
        return bool(session.extents)

    def _give_back(self, session: Session) -> None:
        if self._reserved is not None:
            for extent in session.extents:
                self._reserved.release(extent)
            session.extents = ()

    # -- one call ----------------------------------------------------------------------------

    def _begin(self, call: Call) -> None:
        session, turn = call.session, call.session.turn
        del session.tokens[turn.keep :]
        new = self._contexts.tokens(turn.pieces)
        try:
            commits = self._contexts.open(session.contexts, session.tokens, new, turn.branches)
        except PoolExhausted:
            self._refuse(call)
            return
        session.tokens += new
        call.num_committing = len(commits)
        self._calls.update(dict.fromkeys(commits, call))

    def _take_news(self, operation: Operation) -> None:
        call = self._calls.get(operation)
        if call is None:  # another part of its call was refused
            return
        if isinstance(operation, Generation):
            self._take_tokens(call, operation)
        if operation.is_done:
            self._calls.pop(operation, None)
        if isinstance(operation, Commit):
            if operation.error is not None:
                self._refuse(call)
                return
            call.num_committing -= 1
            if not call.num_committing:
                self._generate(call)

    def _generate(self, call: Call) -> None:
        turn = call.session.turn
        try:
            generations = self._contexts.generate(
                call.session.contexts, turn.branches, turn.num_out
            )
        except PoolExhausted:
            self._refuse(call)
            return
        call.num_generating = turn.branches
        call.first = generations[0]
        self._calls.update(dict.fromkeys(generations, call))

    def _take_tokens(self, call: Call, generation: Generation) -> None:
        now, meter = self._clock.now, self.meter
        is_counted = call.arrived >= meter.since
        for news in generation.take_news():
            if isinstance(news, Chunk) and news.token_ids:
                branch = generation, news.branch
                before = call.last_token.get(branch)
                if is_counted and before is not None:
                    meter.next_tokens.append(now - before)
                elif is_counted:
                    meter.first_tokens.append(now - call.arrived)
                meter.num_tokens += len(news.token_ids) * is_counted
                call.last_token[branch] = now
                if generation is call.first and news.branch == 0:
                    call.answer += news.token_ids
            elif isinstance(news, Finish):
                call.has_failed = call.has_failed or news.error is not None
                call.num_generating -= 1
        if call.num_generating == 0:
            self._over.append(call)
            if not self._policy.by_request or len(self._over) == len(self._active):
                over, self._over = self._over, []
                for each in over:
                    self._end(each)
                self._let_in()

    def _refuse(self, call: Call) -> None:
        """Puts a refused call back; it is tried again later, as a client would."""
        self.meter.refused(self._engine.observer.pool())
        self._active.remove(call)
        self._calls = {key: other for key, other in self._calls.items() if other is not call}
        self._contexts.drop_lost(call.session.contexts)
        if not self._contexts.keeps:
            self._contexts.rest(call.session.contexts, is_last=True)
            self._give_back(call.session)
        again = Call(call.session, call.arrived)
        self._put_back.append(again)
        self._at(self._clock.now + RETRY, lambda: self._come_again(again))

    def _come_again(self, call: Call) -> None:
        self._put_back.remove(call)
        self._waiting.append(call)
        self._let_in()

    def _end(self, call: Call) -> None:
        """Ends a call: its session rests, and comes again after its next pause."""
        if call.has_failed:
            self._refuse(call)
            return
        session = call.session
        self._active.remove(call)
        self.meter.num_turns += call.arrived >= self.meter.since
        session.tokens += call.answer
        session.next_turn += 1
        is_last = session.next_turn == len(session.script.turns)
        self._contexts.rest(session.contexts, is_last=is_last)
        if is_last or not self._contexts.keeps:
            self._give_back(session)
        if is_last:
            session.on_end()
            return
        turn = session.turn
        session.num_helpers = len(turn.helpers) + 1  # the pause itself is awaited like a helper
        for helper in turn.helpers:
            self.start(self._clock.now, helper, lambda: self._go_on(session))
        self._at(self._clock.now + turn.pause, lambda: self._go_on(session))

    def _go_on(self, session: Session) -> None:
        session.num_helpers -= 1
        if not session.num_helpers:
            self._arrive(session)
