"""The asyncio client, on gRPC's asyncio stack."""

# ruff: noqa: ASYNC109 -- a timeout here is the deadline that travels with the call, so that the
# server stops working too; asyncio.timeout would end the wait alone.

from collections.abc import AsyncIterator, Mapping, Sequence
from types import TracebackType
from typing import Self

from agentkv.client import handle_state, snapshot_calls
from agentkv.client.async_context_handle import AsyncContextHandle
from agentkv.client.client import DEFAULT_ADDRESS, DEFAULT_TIMEOUT
from agentkv.client.drive import AsyncDriver
from agentkv.client.grpc_transport import AsyncGrpcTransport
from agentkv.client.leaving import not_hiding
from agentkv.client.messages import NO_LABELS, ChatOptions, ChatTurn, Lease
from agentkv.client.retry import DEFAULT_RETRY, RetryPolicy
from agentkv.client.server_info import ServerInfo
from agentkv.client.session import Session
from agentkv.client.snapshot_info import RestoredContexts, SnapshotInfo
from agentkv.client.transport import AsyncTransport
from agentkv.client.usage_info import UsageInfo
from agentkv.client.values import ContextInfo, PoolInfo, Usage
from agentkv.client.watch_state import WatchState
from agentkv.client.watch_stream import AsyncWatchStream
from agentkv.constraint import Tool


class AsyncClient:
    """A connection to one server.

        async with AsyncClient("127.0.0.1:50051") as client:
            async with await client.create("Once upon") as root:
                for branch in await root.complete_branches(8, max_tokens=32, temperature=0.8):
                    print(branch.text)

    Leaving the `async with` releases every context made through the client that was neither
    released nor detached, then closes the connection. A client belongs to the event loop of its
    first call, which connects.

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
        transport: AsyncTransport | None = None,
    ) -> None:
        self._session = Session(timeout=timeout, retry=retry)
        self._driver = AsyncDriver(transport or AsyncGrpcTransport(address))
        self._is_closed = False

    @property
    def usage(self) -> Usage:
        """Sums the tokens that all calls of this client ran, reused and made."""
        return self._session.usage

    @property
    def pool(self) -> PoolInfo | None:
        """Returns the server's pool as the last answer showed it; None before the first."""
        return self._session.pool

    async def create(
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
    ) -> AsyncContextHandle:
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
        return AsyncContextHandle(self._driver, await self._driver.run(operation))

    async def attach(self, id: str, *, timeout: float | None = None) -> AsyncContextHandle:
        """Returns a handle of a context that exists; it is owned once its `async with` is entered.

        Raises:
            NotFound: There is none of this id.
        """
        state = await self._driver.run(handle_state.attach(self._session, id, timeout))
        return AsyncContextHandle(self._driver, state)

    async def list(
        self,
        root_id: str | None = None,
        *,
        page_size: int | None = None,
        timeout: float | None = None,
    ) -> AsyncIterator[ContextInfo]:
        """Yields every context of the caller, page by page, in the order of their handles.

        One that is made meanwhile may be missed; one that lives throughout is listed once.

        Args:
            root_id: Yields only what descends from this created context.
            page_size: Contexts fetched by one call; None leaves it to the server.
            timeout: Seconds for one page.
        """
        token = ""
        while True:
            contexts, token = await self._driver.run(
                self._session.list_page(root_id, page_size, token, timeout)
            )
            for context in contexts:
                yield context
            if not token:
                return

    async def get_usage(
        self, root_id: str | None = None, *, timeout: float | None = None
    ) -> UsageInfo:
        """Tells what all contexts of the caller have used, released ones too, and its quotas.

        Args:
            root_id: Tells it of this created context and what descends from it alone.
            timeout: Seconds.

        Raises:
            NotFound: There is no such tree, or it ended long ago.
        """
        return await self._driver.run(self._session.usage_of(None, root_id, timeout))

    async def restore(
        self,
        name: str,
        *,
        with_kv: bool = True,
        lease: Lease | None = None,
        timeout: float | None = None,
    ) -> "RestoredContexts[AsyncContextHandle]":
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
        restored = await self._driver.run(
            snapshot_calls.restore(self._session, name, with_kv, lease, timeout)
        )
        handles = tuple(AsyncContextHandle(self._driver, state) for state in restored.handles)
        return RestoredContexts(
            handles, restored.saved_ids, restored.num_kv_tokens, restored.kv_refusal
        )

    async def list_snapshots(self, *, timeout: float | None = None) -> Sequence[SnapshotInfo]:
        """Lists the caller's snapshots by name, but for damaged ones."""
        return await self._driver.run(snapshot_calls.all_snapshots(self._session, timeout))

    async def delete_snapshot(self, name: str, *, timeout: float | None = None) -> None:
        """Removes a snapshot, a damaged one too; one that is gone already is passed over."""
        await self._driver.run(snapshot_calls.delete(self._session, name, timeout))

    async def server_info(self, *, timeout: float | None = None) -> ServerInfo:
        """Describes the server: its model, pool, limits and counters."""
        return await self._driver.run(self._session.server_info(timeout))

    def watch(self, *, timeout: float | None = None) -> AsyncWatchStream:
        """Starts to watch the caller's contexts, a snapshot first; returns the stream at once.

        Args:
            timeout: Seconds until it ends with DeadlineExceeded; None: never, and what the server
                ends is watched again.
        """
        state = WatchState(self._session, self._driver.transport.stream, timeout)
        return AsyncWatchStream(self._driver, state)

    async def close(self) -> None:
        """Releases the contexts that are still owned, then disconnects. Closing twice is fine."""
        if self._is_closed:
            return
        self._is_closed = True
        try:
            await self._driver.run(self._session.leave(self._session.lineage.owned()))
        finally:
            await self._driver.transport.close()

    async def __aenter__(self) -> Self:
        """Returns this client."""
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Closes."""
        with not_hiding(error):
            await self.close()
