"""The blocking client, on gRPC's blocking stack."""

from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Final, Self

from agentkv.client import handle_state, snapshot_calls
from agentkv.client.context_handle import ContextHandle
from agentkv.client.drive import Driver
from agentkv.client.grpc_transport import GrpcTransport
from agentkv.client.leaving import not_hiding
from agentkv.client.messages import NO_LABELS, ChatOptions, ChatTurn, Lease
from agentkv.client.retry import DEFAULT_RETRY, RetryPolicy
from agentkv.client.server_info import ServerInfo
from agentkv.client.session import Session
from agentkv.client.snapshot_info import RestoredContexts, SnapshotInfo
from agentkv.client.transport import Transport
from agentkv.client.usage_info import UsageInfo
from agentkv.client.values import ContextInfo, PoolInfo, Usage
from agentkv.client.watch_state import WatchState
from agentkv.client.watch_stream import WatchStream
from agentkv.constraint import Tool

DEFAULT_ADDRESS: Final = "127.0.0.1:50051"
DEFAULT_TIMEOUT: Final = 120.0


class Client:
    """A connection to one server.

        with Client("127.0.0.1:50051") as client, client.create("Once upon") as root:
            for branch in root.complete_branches(8, max_tokens=32, temperature=0.8):
                print(branch.text)

    Leaving the `with` releases every context made through the client that was neither released
    nor detached, then closes the connection. Several threads may share a client. It connects by
    the first call, not when it is made.

    Args:
        address: `host:port`, or `unix:///path`.
        timeout: Seconds for a call that names none, retries included.
        retry: When to repeat calls that may be repeated; None for never.
        transport: Where calls go in place of a connection to `address`; the client closes it.

    Raises:
        InvalidRequest: `timeout` is not a positive, finite number.
    """

    def __init__(
        self,
        address: str = DEFAULT_ADDRESS,
        *,
        timeout: float = DEFAULT_TIMEOUT,
        retry: RetryPolicy | None = DEFAULT_RETRY,
        transport: Transport | None = None,
    ) -> None:
        self._session = Session(timeout=timeout, retry=retry)
        self._driver = Driver(transport or GrpcTransport(address))
        self._is_closed = False

    @property
    def usage(self) -> Usage:
        """Sums the tokens that all calls of this client ran, reused and made."""
        return self._session.usage

    @property
    def pool(self) -> PoolInfo | None:
        """Returns the server's pool as the last answer showed it; None before the first."""
        return self._session.pool

    def create(
        self,
        text: str | None = None,
        *,
        messages: Sequence[ChatTurn] | None = None,
        token_ids: Sequence[int] | None = None,
        tools: Sequence[Tool] = (),
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        allow_special: bool = False,
        lease: Lease | None = None,
        labels: Mapping[str, str] = NO_LABELS,
        logprobs: bool = False,
        adapter: str = "",
        timeout: float | None = None,
    ) -> ContextHandle:
        """Makes a context of exactly one form of prompt, and computes its KV.

        Args:
            text: Text, to which the model's own begin-of-sequence token is added.
            messages: A conversation, rendered by the model's chat template.
            token_ids: Token ids, taken as they are.
            tools: What the chat template shows the model as callable.
            add_generation_prompt: Whether to open the assistant's turn after the messages.
            continue_final_message: Whether the last message, an assistant's, stays open instead.
            allow_special: Whether text of special tokens in `text` becomes those tokens.
            lease: For how long, and how firmly, its KV is kept; None: RETAIN, the default time.
            labels: Labels to show in `info` and `list`.
            logprobs: Whether to report the prompt's log-probabilities, as `prompt_logprobs` of the
                handle; cached tokens are run again for it.
            adapter: One of the server's adapters, which all its branches inherit; empty: none.
            timeout: Seconds, retries included; None takes the client's.

        Raises:
            InvalidRequest: The prompt is empty, too long, or none the model can take; or there is
                no such adapter.
            PoolExhausted: There are no blocks, no place in the queue, or too many contexts or pins.
        """
        operation = handle_state.create(
            self._session,
            text,
            messages,
            token_ids,
            ChatOptions(add_generation_prompt, continue_final_message, tools),
            allow_special,
            lease,
            labels,
            logprobs,
            adapter,
            timeout,
        )
        return ContextHandle(self._driver, self._driver.run(operation))

    def attach(self, id: str, *, timeout: float | None = None) -> ContextHandle:
        """Returns a handle of a context that exists; it is owned once its `with` is entered.

        Raises:
            NotFound: There is none of this id.
        """
        state = self._driver.run(handle_state.attach(self._session, id, timeout))
        return ContextHandle(self._driver, state)

    def list(
        self,
        root_id: str | None = None,
        *,
        page_size: int | None = None,
        timeout: float | None = None,
    ) -> Iterator[ContextInfo]:
        """Yields every context of the caller, page by page, in the order of their handles.

        One that is made meanwhile may be missed; one that lives throughout is listed once.

        Args:
            root_id: Yields only what descends from this created context.
            page_size: Contexts fetched by one call; None leaves it to the server.
            timeout: Seconds for one page.
        """
        token = ""
        while True:
            contexts, token = self._driver.run(
                self._session.list_page(root_id, page_size, token, timeout)
            )
            yield from contexts
            if not token:
                return

    def get_usage(self, root_id: str | None = None, *, timeout: float | None = None) -> UsageInfo:
        """Tells what all contexts of the caller have used, released ones too, and its quotas.

        Args:
            root_id: Tells it of this created context and what descends from it alone.
            timeout: Seconds.

        Raises:
            NotFound: There is no such tree, or it ended long ago.
        """
        return self._driver.run(self._session.usage_of(None, root_id, timeout))

    def restore(
        self,
        name: str,
        *,
        with_kv: bool = True,
        lease: Lease | None = None,
        timeout: float | None = None,
    ) -> "RestoredContexts[ContextHandle]":
        """Makes contexts of a snapshot: new handles, the same tokens and lineage.

        Args:
            name: Of the snapshot.
            with_kv: Whether its KV is used; otherwise, or where it cannot be, the next use of a
                context computes it.
            lease: Of every context; None: the one it had when it was saved.
            timeout: Seconds.

        Raises:
            NotFound: There is none of this name.
            ContextLost: It is damaged.
            InvalidRequest: It was made with another model, or the server keeps no snapshots.
            PoolExhausted: There would be too many contexts or pins.
        """
        restored = self._driver.run(
            snapshot_calls.restore(self._session, name, with_kv, lease, timeout)
        )
        handles = tuple(ContextHandle(self._driver, state) for state in restored.handles)
        return RestoredContexts(
            handles, restored.saved_ids, restored.num_kv_tokens, restored.kv_refusal
        )

    def list_snapshots(self, *, timeout: float | None = None) -> Sequence[SnapshotInfo]:
        """Lists the caller's snapshots by name, but for damaged ones."""
        return self._driver.run(snapshot_calls.all_snapshots(self._session, timeout))

    def delete_snapshot(self, name: str, *, timeout: float | None = None) -> None:
        """Removes a snapshot, a damaged one too; one that is gone already is passed over."""
        self._driver.run(snapshot_calls.delete(self._session, name, timeout))

    def server_info(self, *, timeout: float | None = None) -> ServerInfo:
        """Describes the server: its model, pool, limits and counters."""
        return self._driver.run(self._session.server_info(timeout))

    def watch(self, *, timeout: float | None = None) -> WatchStream:
        """Starts to watch the caller's contexts, a snapshot first; returns the stream at once.

        Args:
            timeout: Seconds until it ends with DeadlineExceeded; None: never, and what the server
                ends is watched again.
        """
        state = WatchState(self._session, self._driver.transport.stream, timeout)
        return WatchStream(self._driver, state)

    def close(self) -> None:
        """Releases the contexts that are still owned, then disconnects. Closing twice is fine."""
        if self._is_closed:
            return
        self._is_closed = True
        try:
            self._driver.run(self._session.leave(self._session.lineage.owned()))
        finally:
            self._driver.transport.close()

    def __enter__(self) -> Self:
        """Returns this client."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Closes."""
        with not_hiding(error):
            self.close()
