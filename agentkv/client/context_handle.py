"""The handle of the blocking client: thin, the rules are in `agentkv.client.handle_state`."""

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Self, Unpack

from agentkv.client import snapshot_calls
from agentkv.client.completion import Completion, GeneratedBranch
from agentkv.client.context_group import ContextGroup
from agentkv.client.drive import Driver
from agentkv.client.generation import BranchesState, GenerateState
from agentkv.client.handle_base import HandleBase
from agentkv.client.handle_state import HandleState
from agentkv.client.leaving import not_hiding
from agentkv.client.messages import (
    NO_LABELS,
    NO_LEASE,
    ChatOptions,
    ChatTurn,
    Continuation,
    Lease,
)
from agentkv.client.sampling_options import SamplingOptions
from agentkv.client.snapshot_info import SnapshotInfo
from agentkv.client.streams import BranchStream, GenerateStream
from agentkv.client.usage_info import UsageInfo
from agentkv.client.values import (
    Choice,
    ContextInfo,
    ContinuationScore,
    Extension,
    LeaseInfo,
    LeaseMode,
    Released,
)


class ContextHandle(HandleBase):
    """One context of a server.

    Leaving its `with` releases it and every branch made from it through handles, the newest
    first, but for those that were detached. Every call takes a `timeout` in seconds, retries
    included; None takes the client's. Every call may raise AgentKVError. A handle belongs to one
    thread at a time; different handles may be used at once.
    """

    def __init__(self, driver: Driver, state: HandleState) -> None:
        super().__init__(state)
        self._driver = driver

    def fork(
        self,
        count: int = 1,
        *,
        at: int | None = None,
        lease: Lease | None = None,
        labels: Mapping[str, str] = NO_LABELS,
        timeout: float | None = None,
    ) -> ContextGroup:
        """Makes branches that share every token of this context below `at`; free in its length.

        Args:
            count: Number of branches, at least 1.
            at: Position to fork at, in [0, length]; None forks at the length.
            lease: How firmly the branches' KV is kept; None: as this context's.
            labels: Labels of every branch.
            timeout: Seconds.

        Raises:
            InvalidRequest: `count` or `at` is out of range.
            PoolExhausted: A limit of contexts, of depth or of pins is reached.
        """
        branches = self._driver.run(self._state.fork(count, at, lease, labels, timeout))
        return ContextGroup(self._driver, [self._wrap(branch) for branch in branches])

    def fork_one(
        self,
        *,
        at: int | None = None,
        lease: Lease | None = None,
        labels: Mapping[str, str] = NO_LABELS,
        timeout: float | None = None,
    ) -> "ContextHandle":
        """Makes one branch; otherwise as `fork`."""
        return self.fork(1, at=at, lease=lease, labels=labels, timeout=timeout)[0]

    def extend(
        self,
        text: str | None = None,
        *,
        messages: Sequence[ChatTurn] | None = None,
        token_ids: Sequence[int] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        logprobs: bool = False,
        allow_special: bool = False,
        timeout: float | None = None,
    ) -> Extension:
        """Appends tokens and computes their KV; all of them or none.

        It is repeated when the server cannot be reached, and never appends twice. When a repeat
        finds that the call whose answer was lost had succeeded, token ids are compared and the
        answer is success, without usage; for text, messages, or with `logprobs`, it is
        ContextMoved.

        Messages follow those that the context was created and extended with. What was generated
        since is the assistant's turn before them, which is closed as the model's chat template
        closes it. Exactly what the template writes for the whole conversation is appended, or the
        call is refused: some templates drop parts of earlier turns, such as reasoning.

        Args:
            text: Text to tokenise and append; or
            messages: messages, a tool's result for one; or
            token_ids: token ids.
            add_generation_prompt: Whether to open the assistant's turn after the messages.
            continue_final_message: Whether the last message, an assistant's, stays open instead.
            logprobs: Whether to report the log-probability of each appended token.
            allow_special: Whether text of special tokens becomes those tokens.
            timeout: Seconds.

        Raises:
            ContextMoved: The context is not at `length`: another handle changed it, or a call
                that seemed to fail did not. `refresh`, and look.
            ContextBusy: Another request is changing the context.
            InvalidRequest: Messages cannot follow, reason CHAT_NOT_EXTENDABLE: `create` with the
                whole conversation, which reuses what it has in common with this context.
            PoolExhausted: There are no blocks, or no place in the queue.
        """
        chat = ChatOptions(add_generation_prompt, continue_final_message)
        return self._driver.run(
            self._state.extend(text, messages, token_ids, chat, logprobs, allow_special, timeout)
        )

    def generate(
        self, *, timeout: float | None = None, **options: Unpack[SamplingOptions]
    ) -> GenerateStream:
        """Starts to generate, and returns the stream at once.

        Args:
            timeout: Seconds for the whole stream.
            options: Fields of SamplingParams: max_tokens, temperature, seed, stop, ...

        Raises:
            InvalidRequest: An option is out of range. Everything else is raised by the stream.
        """
        return GenerateStream(
            self._driver,
            GenerateState(self._state, self._driver.transport.stream, options, timeout),
        )

    def complete(
        self, *, timeout: float | None = None, **options: Unpack[SamplingOptions]
    ) -> Completion:
        """Generates to the end and returns everything; otherwise as `generate`."""
        with self.generate(timeout=timeout, **options) as stream:
            return stream.result()

    def generate_branches(
        self,
        count: int,
        *,
        at: int | None = None,
        labels: Mapping[str, str] = NO_LABELS,
        timeout: float | None = None,
        **options: Unpack[SamplingOptions],
    ) -> BranchStream:
        """Starts to fork and to generate on every branch, in one call; returns at once.

        Args:
            count: Number of branches, at least 1.
            at: Position to fork at, in [0, length]; None forks at the length.
            labels: Labels of every branch.
            timeout: Seconds for the whole stream.
            options: Fields of SamplingParams, for each branch; branch i draws from a random
                stream of its own.

        Raises:
            InvalidRequest: An option is out of range. Everything else is raised by the stream.
        """
        state = BranchesState(
            self._state, self._driver.transport.stream, count, at, labels, options, timeout
        )
        return BranchStream(self._driver, state, self._wrap)

    def complete_branches(
        self,
        count: int,
        *,
        at: int | None = None,
        labels: Mapping[str, str] = NO_LABELS,
        timeout: float | None = None,
        **options: Unpack[SamplingOptions],
    ) -> "list[GeneratedBranch[ContextHandle]]":
        """Forks, generates on every branch and returns them; otherwise as `generate_branches`."""
        with self.generate_branches(
            count, at=at, labels=labels, timeout=timeout, **options
        ) as stream:
            return stream.result()

    def score(
        self,
        continuations: Sequence[Continuation],
        *,
        allow_special: bool = False,
        timeout: float | None = None,
    ) -> list[ContinuationScore]:
        """Computes the log-probabilities of continuations, as each alone would follow.

        Args:
            continuations: Texts or lists of token ids, none empty.
            allow_special: Whether text of special tokens becomes those tokens.
            timeout: Seconds.
        """
        return self._driver.run(self._state.score(continuations, allow_special, timeout))

    def choose(
        self,
        continuations: Sequence[Continuation],
        *,
        by_mean: bool = True,
        allow_special: bool = False,
        timeout: float | None = None,
    ) -> Choice:
        """Picks the most likely of some continuations; changes nothing.

        Args:
            continuations: Texts or lists of token ids, at least one, none empty.
            by_mean: Whether to compare log-probabilities per token, which is fair to long ones;
                else those of whole continuations.
            allow_special: Whether text of special tokens becomes those tokens.
            timeout: Seconds.
        """
        return self._driver.run(self._state.choose(continuations, by_mean, allow_special, timeout))

    def read_tokens(self, start: int = 0, *, timeout: float | None = None) -> list[int]:
        """Reads the committed tokens in [start, length): what a cut stream did not deliver, too.

        Raises:
            InvalidRequest: `start` is beyond the length.
        """
        return self._driver.run(self._state.read_tokens(start, timeout))

    def truncate(self, length: int, *, timeout: float | None = None) -> ContextInfo:
        """Drops every token at or beyond `length`; branches keep theirs.

        Raises:
            ContextMoved: The context is not at the length this handle believes in.
            InvalidRequest: `length` is beyond the context's.
        """
        return self._driver.run(self._state.truncate(length, timeout))

    def update_lease(
        self,
        lease: Lease = NO_LEASE,
        *,
        recursive: bool = False,
        timeout: float | None = None,
    ) -> LeaseInfo:
        """Asks for another lease, and returns what was granted; alone, renews what there is.

        Args:
            lease: A mode, or a mode with its options.
            recursive: Whether everything forked from it gets the same; all or none.
            timeout: Seconds.

        Raises:
            InvalidRequest: The time is one that no lease can have.
            PoolExhausted: The pins would exceed the quota, and may not be reduced.
        """
        return self._driver.run(self._state.update_lease(lease, recursive, timeout))

    def park(self, *, timeout: float | None = None) -> LeaseInfo:
        """Lets the KV leave the device while a tool runs; the next call brings it back."""
        return self.update_lease(LeaseMode.PARK, timeout=timeout)

    def save(
        self,
        name: str,
        *,
        recursive: bool = False,
        with_kv: bool = True,
        overwrite: bool = False,
        timeout: float | None = None,
    ) -> SnapshotInfo:
        """Saves the context to the server's disk, to be restored by name even after a restart.

        Args:
            name: 1 to 128 letters, digits, points, dashes or underscores.
            recursive: Whether everything forked from it is saved too, shared tokens once.
            with_kv: Whether its KV is saved, so that nothing has to be computed again.
            overwrite: Whether a snapshot of this name is replaced.
            timeout: Seconds.

        Raises:
            InvalidRequest: The name is none or in use, or the server keeps no snapshots.
            PoolExhausted: Your snapshots, or the server's disk, are full.
        """
        return self._driver.run(
            snapshot_calls.save(
                self._state.session, self.id, name, recursive, with_kv, overwrite, timeout
            )
        )

    def release(self, *, recursive: bool = False, timeout: float | None = None) -> Released:
        """Releases the context; its branches live on. Releasing twice is fine.

        Args:
            recursive: Whether to release everything forked from it too, by whomever.
            timeout: Seconds.
        """
        return self._driver.run(self._state.release(recursive, timeout))

    def get_usage(self, *, timeout: float | None = None) -> UsageInfo:
        """Tells what this context has used since it was made: tokens, and memory over time."""
        return self._driver.run(self._state.session.usage_of(self.id, None, timeout))

    def refresh(self, *, timeout: float | None = None) -> ContextInfo:
        """Asks how the context is, and takes over its length.

        Raises:
            NotFound: It was released.
        """
        return self._driver.run(self._state.refresh(timeout))

    def __enter__(self) -> Self:
        """Owns the context, if it does not yet, and returns this handle."""
        return self._enter()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Releases what is owned; what is gone already is passed over."""
        with not_hiding(error):
            self._driver.run(self._state.leave())

    def _wrap(self, state: HandleState) -> "ContextHandle":
        return ContextHandle(self._driver, state)
