"""What the service needs of an engine, as protocols. It knows no implementation.

`agentkv.engine.async_engine.AsyncEngine` is the one that serves; tests pass a small fake.
"""

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Protocol, Self, TypeVar

from agentkv.config import LeaseConfig, LimitsConfig
from agentkv.constraint import Constraint, Continued, Tool
from agentkv.core.lease import LeaseTerms
from agentkv.core.usage_view import UsageView
from agentkv.core.views import ContextPage, ContextView
from agentkv.core.watch import WatchUpdate
from agentkv.engine.conversation import ChatExtension, ChatMessage, Conversation, Ending
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
from agentkv.sampling_params import SamplingParams

UpdateT_co = TypeVar("UpdateT_co", covariant=True)


class TokenizerLike(Protocol):
    """Text to token ids. Called from threads other than the event loop's."""

    def encode(self, text: str, *, allow_special: bool = False) -> Sequence[int]:
        """Tokenises text as it stands."""
        ...

    def encode_prompt(self, text: str, *, allow_special: bool = False) -> Sequence[int]:
        """Tokenises text that begins a context."""
        ...

    def encode_chat(
        self,
        messages: Sequence[ChatMessage],
        *,
        ending: Ending = ...,
        tools: Sequence[Tool] = (),
    ) -> Sequence[int]:
        """Renders a conversation with the model's template and tokenises it."""
        ...

    def extend_chat(
        self, before: Conversation, turn_ids: Sequence[int], added: Conversation
    ) -> ChatExtension:
        """Finds the tokens that new messages append to a conversation."""
        ...


class UpdateStream(Protocol[UpdateT_co]):
    """What one generation, or one watch, reports: one tuple per engine step."""

    async def __aenter__(self) -> Self:
        """Begins the stream."""
        ...

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Ends the stream like `close`."""
        ...

    def close(self) -> None:
        """Cancels what still runs; at once, and as often as one likes."""
        ...

    def __aiter__(self) -> Self:
        """Iterates over the steps."""
        ...

    async def __anext__(self) -> tuple[UpdateT_co, ...]:
        """Waits for the next step that has something to report."""
        ...


class ServedEngine(Protocol):
    """The engine as seen from the event loop. Every method may raise AgentKVError."""

    @property
    def limits(self) -> LimitsConfig:
        """What one tenant or one call may ask for."""
        ...

    @property
    def tokenizer(self) -> TokenizerLike:
        """Text to token ids."""
        ...

    @property
    def lease_limits(self) -> LeaseConfig:
        """For how long, and how firmly, KV may be kept for a tenant."""
        ...

    @property
    def facts(self) -> ModelFacts:
        """The model."""
        ...

    async def start(self) -> None:
        """Starts the engine's thread."""
        ...

    async def stop(self) -> None:
        """Ends every stream with SHUTTING_DOWN, and the engine's thread."""
        ...

    async def wait_ended(self) -> bool:
        """Waits until it serves no more; returns whether it was told to stop, or else failed."""
        ...

    async def create(
        self,
        tenant: str,
        token_ids: Sequence[int],
        *,
        lease: LeaseTerms = ...,
        labels: Mapping[str, str] = ...,
        request_id: str | None = None,
        logprobs: bool = False,
        chat: Conversation | None = None,
        adapter: str = "",
    ) -> Committed:
        """Creates a context and computes its KV."""
        ...

    async def fork(
        self,
        tenant: str,
        context_id: str,
        *,
        count: int = 1,
        at: int | None = None,
        lease: LeaseTerms | None = None,
        labels: Mapping[str, str] = ...,
        request_id: str | None = None,
    ) -> Forked:
        """Makes `count` contexts that share every token below `at`."""
        ...

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
        """Appends tokens and computes their KV."""
        ...

    async def compile(self, constraint: Constraint) -> Grammar | Continued:
        """Compiles a constraint, away from the event loop and the engine's thread."""
        ...

    def generate(
        self,
        tenant: str,
        context_id: str,
        params: SamplingParams,
        *,
        expected_length: int | None = None,
        grammar: Grammar | Continued | None = None,
    ) -> UpdateStream[Update]:
        """Generates on a context."""
        ...

    def generate_branches(
        self,
        tenant: str,
        context_id: str,
        count: int,
        params: SamplingParams,
        *,
        at: int | None = None,
        labels: Mapping[str, str] = ...,
        grammar: Grammar | Continued | None = None,
    ) -> UpdateStream[Update]:
        """Forks a context and generates on every branch."""
        ...

    async def score(
        self, tenant: str, context_id: str, continuations: Sequence[Sequence[int]]
    ) -> Scores:
        """Computes log-probabilities of continuations."""
        ...

    async def truncate(
        self, tenant: str, context_id: str, length: int, *, expected_length: int | None = None
    ) -> Truncated:
        """Drops every token at or beyond `length`."""
        ...

    async def update_lease(
        self, tenant: str, context_id: str, terms: LeaseTerms, *, recursive: bool = False
    ) -> Leased:
        """Renews or replaces leases, all or none."""
        ...

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
        """Saves a context or a tree, whole or not at all."""
        ...

    async def restore(
        self,
        tenant: str,
        name: str,
        *,
        with_kv: bool = True,
        lease: LeaseTerms | None = None,
        request_id: str | None = None,
    ) -> Restored:
        """Makes contexts of a snapshot, all or none."""
        ...

    async def list_snapshots(self, tenant: str) -> Sequence[SnapshotView]:
        """Lists a tenant's snapshots."""
        ...

    async def delete_snapshot(self, tenant: str, name: str) -> None:
        """Removes a snapshot."""
        ...

    def watch(self, tenant: str) -> UpdateStream[WatchUpdate]:
        """Tells what happens to a tenant's contexts, a snapshot first."""
        ...

    async def end_watches(self) -> None:
        """Ends every watch with SHUTTING_DOWN: nobody else would."""
        ...

    async def release(
        self,
        tenant: str,
        context_ids: Sequence[str],
        *,
        recursive: bool = False,
        allow_missing: bool = False,
    ) -> Released:
        """Releases contexts, all or none."""
        ...

    async def get(self, tenant: str, context_id: str) -> ContextView:
        """Describes one context."""
        ...

    async def tokens(
        self, tenant: str, context_id: str, start: int = 0, *, limit: int | None = None
    ) -> ContextTokens:
        """Describes one context and reads its tokens in [start, start + limit)."""
        ...

    async def chat(
        self, tenant: str, context_id: str, *, expected_length: int | None = None
    ) -> ChatState:
        """Tells what conversation a context was made of."""
        ...

    async def list(
        self, tenant: str, *, root_id: str | None = None, page_size: int = 100, page_token: str = ""
    ) -> ContextPage:
        """Lists a tenant's contexts."""
        ...

    async def usage(
        self, tenant: str, *, context_id: str | None = None, root_id: str | None = None
    ) -> UsageView:
        """Shows what a context, a tree or else the whole tenant has used."""
        ...

    async def view(self) -> EngineView:
        """Describes the engine."""
        ...
