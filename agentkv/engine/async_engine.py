"""`Engine` for callers on an event loop: every verb runs on the engine's thread, between two steps.

It decides nothing: what a verb means is `Engine`'s affair.
"""

import asyncio
from collections.abc import Mapping, Sequence

from agentkv.config import LeaseConfig, LimitsConfig
from agentkv.constraint import Constraint, Continued
from agentkv.core.lease import DEFAULT_TERMS, LeaseTerms
from agentkv.core.usage_view import UsageView
from agentkv.core.views import ContextPage, ContextView
from agentkv.core.watch import WatchUpdate
from agentkv.engine.conversation import Conversation
from agentkv.engine.engine import Engine
from agentkv.engine.engine_stream import EngineStream
from agentkv.engine.engine_thread import EngineThread, shutting_down
from agentkv.engine.grammar import Grammar
from agentkv.engine.outputs import (
    ChatState,
    Committed,
    ContextTokens,
    EngineView,
    Forked,
    Leased,
    ModelFacts,
    Released,
    Restored,
    Saved,
    Scores,
    SnapshotView,
    Truncated,
    Update,
)
from agentkv.engine.snapshots import Snapshots
from agentkv.engine.tokenizer import Tokenizer
from agentkv.sampling_params import SamplingParams


class AsyncEngine:
    """An `Engine` for callers on one event loop.

    Cancelling an awaited call cancels the operation, unless another caller awaits the same one:
    each context then stays at its last committed token.
    """

    def __init__(self, engine: Engine, *, stream_interval: float | None = None) -> None:
        """Takes an engine over; arguments as `EngineThread`'s."""
        self._engine = engine
        self._thread = EngineThread(engine, stream_interval)
        self._snapshots = Snapshots(engine, self._thread)

    @property
    def limits(self) -> LimitsConfig:
        """What one tenant or one call may ask for."""
        return self._engine.limits

    @property
    def lease_limits(self) -> LeaseConfig:
        """For how long, and how firmly, KV may be kept for a tenant."""
        return self._engine.lease_limits

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer; it may be used on any thread."""
        return self._engine.tokenizer

    @property
    def facts(self) -> ModelFacts:
        """What a client may want to know of the model."""
        return self._engine.facts

    async def compile(self, constraint: Constraint) -> Grammar | Continued:
        """Compiles a constraint on a thread of its own; see `GrammarCompiler.compile_soon`."""
        if isinstance(constraint, Continued):
            return constraint
        return await self._engine.grammars.compile_soon(constraint)

    async def start(self) -> None:
        """Starts the engine's thread; answers arrive on the running event loop."""
        self._thread.start()

    async def stop(self) -> None:
        """Ends what still runs with SHUTTING_DOWN and stops the thread. Stopping twice is fine."""
        await self._thread.stop()
        await asyncio.to_thread(self._snapshots.close)
        self._engine.close()

    async def wait_ended(self) -> bool:
        """Waits until the engine serves no more; returns whether it was told to stop.

        Otherwise a fault of its own ended it, and every call is refused with ENGINE_STALLED.
        """
        return await self._thread.wait_ended()

    async def create(
        self,
        tenant: str,
        token_ids: Sequence[int],
        *,
        lease: LeaseTerms = DEFAULT_TERMS,
        labels: Mapping[str, str] | None = None,
        request_id: str | None = None,
        logprobs: bool = False,
        chat: Conversation | None = None,
        adapter: str = "",
    ) -> Committed:
        """Makes a context of these tokens; see `Contexts.create`."""
        operation = await self._thread.complete(
            lambda: self._engine.contexts.create(
                tenant,
                token_ids,
                lease=lease,
                labels=labels,
                request_id=request_id,
                logprobs=logprobs,
                chat=chat,
                adapter=adapter,
            )
        )
        return operation.answer

    async def fork(
        self,
        tenant: str,
        context_id: str,
        *,
        count: int = 1,
        at: int | None = None,
        lease: LeaseTerms | None = None,
        labels: Mapping[str, str] | None = None,
        request_id: str | None = None,
    ) -> Forked:
        """Makes contexts that share this one's tokens; see `Contexts.fork`."""
        return await self._thread.call(
            lambda: Forked(
                self._engine.contexts.fork(
                    tenant,
                    context_id,
                    count=count,
                    at=at,
                    lease=lease,
                    labels=labels,
                    request_id=request_id,
                ),
                self._engine.observer.pool(),
            )
        )

    async def extend(
        self,
        tenant: str,
        context_id: str,
        token_ids: Sequence[int],
        *,
        expected_length: int | None = None,
        logprobs: bool = False,
        chat: Conversation | None = None,
    ) -> Committed:
        """Appends given tokens, all or none; see `Contexts.extend`."""
        operation = await self._thread.complete(
            lambda: self._engine.contexts.extend(
                tenant,
                context_id,
                token_ids,
                expected_length=expected_length,
                logprobs=logprobs,
                chat=chat,
            )
        )
        return operation.answer

    def generate(
        self,
        tenant: str,
        context_id: str,
        params: SamplingParams,
        *,
        expected_length: int | None = None,
        grammar: Grammar | Continued | None = None,
    ) -> EngineStream[Update]:
        """Samples and commits tokens; see `Inference.generate`. Starts when entered."""
        return self._thread.stream(
            lambda: self._engine.inference.generate(
                tenant, context_id, params, expected_length=expected_length, grammar=grammar
            ),
            self._engine.cancel,
        )

    def generate_branches(
        self,
        tenant: str,
        context_id: str,
        count: int,
        params: SamplingParams,
        *,
        at: int | None = None,
        labels: Mapping[str, str] | None = None,
        grammar: Grammar | Continued | None = None,
    ) -> EngineStream[Update]:
        """Forks and generates; see `Inference.generate_branches`. Starts when entered."""
        return self._thread.stream(
            lambda: self._engine.inference.generate_branches(
                tenant, context_id, count, params, at=at, labels=labels, grammar=grammar
            ),
            self._engine.cancel,
        )

    async def score(
        self, tenant: str, context_id: str, continuations: Sequence[Sequence[int]]
    ) -> Scores:
        """Computes log-probabilities of continuations; see `Inference.score`."""
        operation = await self._thread.complete(
            lambda: self._engine.inference.score(tenant, context_id, continuations)
        )
        return operation.answer

    async def truncate(
        self, tenant: str, context_id: str, length: int, *, expected_length: int | None = None
    ) -> Truncated:
        """Takes a context back to its first tokens; see `Contexts.truncate`."""
        return await self._thread.call(
            lambda: Truncated(
                self._engine.contexts.truncate(
                    tenant, context_id, length, expected_length=expected_length
                ),
                self._engine.observer.pool(),
            )
        )

    async def update_lease(
        self, tenant: str, context_id: str, terms: LeaseTerms, *, recursive: bool = False
    ) -> Leased:
        """Renews or replaces leases; see `Contexts.update_lease`."""
        return await self._thread.call(
            lambda: self._engine.contexts.update_lease(
                tenant, context_id, terms, recursive=recursive
            )
        )

    def watch(self, tenant: str) -> EngineStream[WatchUpdate]:
        """Tells what happens to a tenant's contexts; starts when the stream is entered."""
        return self._thread.stream(
            lambda: self._engine.observer.watch(tenant), self._engine.observer.unwatch
        )

    async def end_watches(self) -> None:
        """Ends every watch with SHUTTING_DOWN."""

        def end() -> None:
            for watcher in self._engine.observer.end_watches(shutting_down()):
                self._thread.tell(watcher)

        await self._thread.call(end)

    async def release(
        self,
        tenant: str,
        context_ids: Sequence[str],
        *,
        recursive: bool = False,
        allow_missing: bool = False,
    ) -> Released:
        """Forgets contexts; see `Contexts.release`."""

        def release() -> Released:
            released, ended = self._engine.contexts.release(
                tenant, context_ids, recursive=recursive, allow_missing=allow_missing
            )
            for operation in ended:
                self._thread.settle(operation)
            return released

        return await self._thread.call(release)

    async def get(self, tenant: str, context_id: str) -> ContextView:
        """Describes one context."""
        return await self._thread.call(lambda: self._engine.observer.get(tenant, context_id))

    async def tokens(
        self, tenant: str, context_id: str, start: int = 0, *, limit: int | None = None
    ) -> ContextTokens:
        """Describes one context and reads its tokens; see `Observer.tokens`."""
        return await self._thread.call(
            lambda: ContextTokens(
                self._engine.observer.get(tenant, context_id),
                self._engine.observer.tokens(tenant, context_id, start, limit=limit),
            )
        )

    async def chat(
        self, tenant: str, context_id: str, *, expected_length: int | None = None
    ) -> ChatState:
        """Tells what conversation a context was made of; see `Contexts.chat`."""
        return await self._thread.call(
            lambda: self._engine.contexts.chat(tenant, context_id, expected_length=expected_length)
        )

    async def list(
        self,
        tenant: str,
        *,
        root_id: str | None = None,
        page_size: int = 100,
        page_token: str = "",
    ) -> ContextPage:
        """Lists a tenant's contexts, a page at a time."""
        return await self._thread.call(
            lambda: self._engine.observer.list(
                tenant, root_id=root_id, page_size=page_size, page_token=page_token
            )
        )

    async def usage(
        self, tenant: str, *, context_id: str | None = None, root_id: str | None = None
    ) -> UsageView:
        """Shows what was used; see `Observer.usage`."""
        return await self._thread.call(
            lambda: self._engine.observer.usage(tenant, context_id=context_id, root_id=root_id)
        )

    async def save(
        self,
        tenant: str,
        context_id: str,
        name: str,
        *,
        recursive: bool = False,
        with_kv: bool = True,
        overwrite: bool = False,
    ) -> Saved:
        """Saves a context or a tree; see `Snapshots.save`."""
        return await self._snapshots.save(
            tenant, context_id, name, recursive=recursive, with_kv=with_kv, overwrite=overwrite
        )

    async def restore(
        self,
        tenant: str,
        name: str,
        *,
        with_kv: bool = True,
        lease: LeaseTerms | None = None,
        request_id: str | None = None,
    ) -> Restored:
        """Makes contexts of a snapshot; see `Snapshots.restore`."""
        return await self._snapshots.restore(
            tenant, name, with_kv=with_kv, lease=lease, request_id=request_id
        )

    async def list_snapshots(self, tenant: str) -> Sequence[SnapshotView]:
        """Lists a tenant's snapshots by name."""
        return await self._snapshots.list(tenant)

    async def delete_snapshot(self, tenant: str, name: str) -> None:
        """Removes a snapshot; see `Snapshots.delete`."""
        await self._snapshots.delete(tenant, name)

    async def view(self) -> EngineView:
        """Describes the engine."""
        return await self._thread.call(self._engine.view)
