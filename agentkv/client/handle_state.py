"""One context as its handle knows it: the rules of every verb, written once for both clients.

It owns the length the handle believes in, and what a repeated or cut call means for it. It does
no input or output: its operations are run by the client's driver.
"""

from collections.abc import Mapping, Sequence

from agentkv.client import messages, replies
from agentkv.client.lineage import Lineage
from agentkv.client.messages import ChatOptions, ChatTurn, Continuation, Lease
from agentkv.client.operation import Call, Operation
from agentkv.client.retry import Attempts
from agentkv.client.session import Session
from agentkv.client.values import (
    Choice,
    ContextInfo,
    ContinuationScore,
    Extension,
    LeaseInfo,
    Released,
    Usage,
)
from agentkv.errors import ContextBusy, ContextMoved
from agentkv.v1 import agentkv_pb2 as pb


class HandleState:
    """The state behind one handle.

    `length` is sent as the expected length of every change, so a change by another handle of the
    same context is an error (ContextMoved), never a surprise, and a repeat can never do a thing
    twice.
    """

    def __init__(self, session: Session, info: ContextInfo, lineage: Lineage) -> None:
        self.session = session
        self.id = info.id
        self.info = info
        self.length = info.length
        self.lineage = lineage
        self.usage = Usage()
        self.prompt_logprobs: tuple[float, ...] = ()
        """Of the prompt it was created from, when asked for."""
        self.is_unsettled = False
        """Whether a stream of this handle was closed early, so that the length is not known."""

    def see(self, info: ContextInfo) -> None:
        """Takes over a view of the server's."""
        self.info = info
        self.length = info.length

    def count(self, usage: Usage) -> None:
        """Adds usage to this handle's own total; the session has counted it already."""
        self.usage += usage

    def child(self, message: pb.Context) -> "HandleState":
        """Makes the state of a context that was forked from this one."""
        return HandleState(self.session, replies.context(message), self.lineage.adopt(message.id))

    def refresh(self, timeout: float | None) -> Operation[ContextInfo]:
        """Asks the server how the context is."""
        self.see((yield from self.session.get(self.id, self.session.attempts(timeout))))
        self.is_unsettled = False
        return self.info

    def settle(self, attempts: Attempts) -> Operation[None]:
        """Learns the length after a stream was closed early.

        The server hears of the closing a moment later than the next call comes from here, so a
        context that is still busy is asked for again.
        """
        if not self.is_unsettled:
            return

        def look(remaining: float) -> Operation[ContextInfo]:
            reply = yield Call("Get", messages.get(self.id), remaining)
            if reply.context.busy:
                raise ContextBusy(f"Context {self.id} is still ending a stream closed early.")
            return replies.context(reply.context)

        attempts.maybe_done = True
        self.see((yield from attempts.run(look)))
        attempts.maybe_done = False
        self.is_unsettled = False

    def fork(
        self,
        count: int,
        at: int | None,
        lease: Lease | None,
        labels: Mapping[str, str],
        timeout: float | None,
    ) -> Operation[list["HandleState"]]:
        """Forks, and keeps the branches in the lineage."""
        request_id = self.session.make_id()
        request = messages.fork(self.id, count, at, lease, labels, request_id)
        attempts = self.session.attempts(timeout)
        reply = yield from self.session.send("Fork", request, attempts, request_id)
        self.session.see(reply)
        return [self.child(message) for message in reply.contexts]

    def extend(
        self,
        text: str | None,
        turns: Sequence[ChatTurn] | None,
        token_ids: Sequence[int] | None,
        chat: ChatOptions,
        logprobs: bool,
        allow_special: bool,
        timeout: float | None,
    ) -> Operation[Extension]:
        """Appends tokens, once, however often the call is sent."""
        attempts = self.session.attempts(timeout)
        yield from self.settle(attempts)
        request = messages.extend(
            self.id,
            text,
            turns,
            token_ids,
            chat=chat,
            expected_length=self.length,
            logprobs=logprobs,
            allow_special=allow_special,
        )
        try:
            reply = yield from self.session.send("Extend", request, attempts)
        except ContextMoved as error:
            # Tokens of a text are not known here, and log-probabilities are told once only.
            if token_ids is None or logprobs:
                raise
            self._check_moved_to(self.length + len(token_ids), error, attempts)
            if (yield from self._read_tokens(self.length, attempts)) != list(token_ids):
                raise
            self.see((yield from self.session.get(self.id, attempts)))
            return Extension(self.length, Usage())
        usage = self.session.see(reply)
        self.count(usage)
        self.see(replies.context(reply.context))
        return Extension(self.length, usage, tuple(reply.logprobs))

    def truncate(self, length: int, timeout: float | None) -> Operation[ContextInfo]:
        """Drops every token at or beyond `length`."""
        attempts = self.session.attempts(timeout)
        yield from self.settle(attempts)
        request = messages.truncate(self.id, length, expected_length=self.length)
        try:
            reply = yield from self.session.send("Truncate", request, attempts)
        except ContextMoved as error:
            self._check_moved_to(length, error, attempts)
            self.see((yield from self.session.get(self.id, attempts)))
            return self.info
        self.session.see(reply)
        self.see(replies.context(reply.context))
        return self.info

    def update_lease(
        self, lease: Lease, recursive: bool, timeout: float | None
    ) -> Operation[LeaseInfo]:
        """Asks for another lease, or renews the one there is."""
        request = messages.update_lease(self.id, lease, recursive=recursive)
        reply = yield from self.session.send("UpdateLease", request, self.session.attempts(timeout))
        self.session.see(reply)
        self.info = replies.context(reply.context)  # not its length: a stream may be under way
        return self.info.lease

    def score(
        self, continuations: Sequence[Continuation], allow_special: bool, timeout: float | None
    ) -> Operation[list[ContinuationScore]]:
        """Scores continuations; changes nothing."""
        request = messages.score(self.id, continuations, allow_special=allow_special)
        reply = yield from self.session.send("Score", request, self.session.attempts(timeout))
        self.count(self.session.see(reply))
        return [replies.score(item) for item in reply.scores]

    def choose(
        self,
        continuations: Sequence[Continuation],
        by_mean: bool,
        allow_special: bool,
        timeout: float | None,
    ) -> Operation[Choice]:
        """Scores continuations, and picks one."""
        scores = yield from self.score(continuations, allow_special, timeout)
        return Choice.among(scores, by_mean=by_mean)

    def release(self, recursive: bool, timeout: float | None) -> Operation[Released]:
        """Releases this context; nothing is sent when it has been released already."""
        if self.lineage.is_released and not recursive:
            return Released()
        below = self.lineage.owned()
        released = yield from self.session.release(
            [self.lineage], recursive=recursive, timeout=timeout
        )
        if recursive:
            for node in below:
                node.release()
        return released

    def leave(self) -> Operation[Released]:
        """Releases what a `with` on this handle must: it and every branch still owned below it."""
        return (yield from self.session.leave(self.lineage.owned()))

    def read_tokens(self, start: int, timeout: float | None) -> Operation[list[int]]:
        """Reads the committed tokens from a position on."""
        return (yield from self._read_tokens(start, self.session.attempts(timeout)))

    def _read_tokens(self, start: int, attempts: Attempts) -> Operation[list[int]]:
        tokens: list[int] = []
        while True:
            request = messages.get(self.id, start + len(tokens))
            reply = yield from self.session.send("Get", request, attempts)
            tokens.extend(reply.token_ids)
            if start + len(tokens) >= reply.context.length or not reply.token_ids:
                return tokens

    def _check_moved_to(self, wanted: int, error: ContextMoved, attempts: Attempts) -> None:
        """Checks that the context is where an earlier attempt, its answer lost, was to bring it.

        Raises:
            ContextMoved: Nothing was repeated, or the context is elsewhere.
        """
        if not attempts.maybe_done or error.actual_length != wanted:
            raise error


def create(
    session: Session,
    text: str | None,
    turns: Sequence[ChatTurn] | None,
    token_ids: Sequence[int] | None,
    chat: ChatOptions,
    allow_special: bool,
    lease: Lease | None,
    labels: Mapping[str, str],
    logprobs: bool,
    adapter: str,
    timeout: float | None,
) -> Operation[HandleState]:
    """Creates a context, once, however often the call is sent."""
    request_id = session.make_id()
    request = messages.create(
        text,
        turns,
        token_ids,
        chat=chat,
        allow_special=allow_special,
        lease=lease,
        labels=labels,
        request_id=request_id,
        logprobs=logprobs,
        adapter=adapter,
    )
    reply = yield from session.send("Create", request, session.attempts(timeout), request_id)
    usage = session.see(reply)
    lineage = session.lineage.adopt(reply.context.id)
    state = HandleState(session, replies.context(reply.context), lineage)
    state.count(usage)
    state.prompt_logprobs = tuple(reply.logprobs)
    return state


def attach(session: Session, context_id: str, timeout: float | None) -> Operation[HandleState]:
    """Asks for a context that exists; it is not owned."""
    info = yield from session.get(context_id, session.attempts(timeout))
    return HandleState(session, info, session.lineage.adopt(info.id, is_owned=False))
