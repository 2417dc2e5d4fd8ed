"""An engine in memory: contexts are lists of tokens, a step is a turn of the event loop.

It knows no block, no model and no thread; the next token is a function of the tokens so far.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, Self, TypeVar

from agentkv.config import LeaseConfig, LimitsConfig
from agentkv.constraint import Constraint, Continued, Tool
from agentkv.core.batch import TopLogprobs
from agentkv.core.bill import Bill
from agentkv.core.block_move import Tier
from agentkv.core.lease import DEFAULT_TERMS, Lease, LeaseMode, LeaseReduction, LeaseTerms
from agentkv.core.pressure import PressureLevel
from agentkv.core.quotas import QuotaView
from agentkv.core.request import FinishReason
from agentkv.core.usage_view import TierView, UsageView
from agentkv.core.views import ContextPage, ContextView, PoolView, Residency, Usage
from agentkv.core.watch import Change, ChangeKind, PoolChange, Snapshot, WatchUpdate
from agentkv.engine.conversation import ChatExtension, ChatMessage, Conversation, Ending
from agentkv.engine.grammar import Grammar
from agentkv.engine.outputs import (
    Branches,
    ChatState,
    Chunk,
    Committed,
    ContextTokens,
    ContinuationScore,
    EngineView,
    Finish,
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
from agentkv.errors import AgentKVError, ContextMoved, InvalidRequest, NotFound, Reason, Unavailable
from agentkv.sampling_params import SamplingParams

VOCAB_SIZE = 300
MAX_LENGTH = 4096

POOL = PoolView(
    total=64,
    free=40,
    live=16,
    cached=8,
    pinned=2,
    block_size=16,
    used_slots=300,
    reclaimable=20,
    level=PressureLevel.SOFT,
)
FACTS = ModelFacts(
    name="fake",
    architecture="FakeForCausalLM",
    vocab_size=VOCAB_SIZE,
    max_length=MAX_LENGTH,
    num_layers=2,
    dtype="float32",
    bytes_per_block=4096,
    has_chat_template=True,
)


class FakeTokenizer:
    """One token per byte; 256 begins a prompt, 257 is `<special>`; `<control>` is refused."""

    def encode(self, text: str, *, allow_special: bool = False) -> list[int]:
        if "<control>" in text:
            raise InvalidRequest("No.", violations={"text": "spells a control token"})
        if not allow_special:
            return list(text.encode())
        parts = text.split("<special>")
        ids = list(parts[0].encode())
        for part in parts[1:]:
            ids += [257, *part.encode()]
        return ids

    def encode_prompt(self, text: str, *, allow_special: bool = False) -> list[int]:
        return [256, *self.encode(text, allow_special=allow_special)]

    def encode_chat(
        self,
        messages: Sequence[ChatMessage],
        *,
        ending: Ending = Ending.PROMPTED,
        tools: Sequence[Tool] = (),
    ) -> list[int]:
        turns = [f"{tool.name}:{tool.parameters}\n" for tool in tools]
        turns += [f"{message.role}:{message.content}\n" for message in messages]
        ends = {Ending.PROMPTED: "assistant:", Ending.CLOSED: "", Ending.CONTINUED: "..."}
        return self.encode_prompt("".join(turns) + ends[ending])

    def extend_chat(
        self, before: Conversation, turn_ids: Sequence[int], added: Conversation
    ) -> ChatExtension:
        if any(message.role == "system" for message in added.messages):
            return ChatExtension((256, 115), added, "a system message comes first")
        turn = ChatMessage("assistant", bytes(turn_ids).decode())
        ids = self.encode_chat(added.messages, ending=added.ending)[1:]
        return ChatExtension((10, *ids), added._replace(messages=(turn, *added.messages)))


@dataclass
class FakeContext:
    """One context of the fake."""

    id: str
    tokens: list[int]
    parent_id: str | None = None
    fork_position: int = 0
    labels: dict[str, str] = field(default_factory=dict)
    chat: Conversation | None = None
    chat_end: int = 0
    lease: Lease = field(default_factory=lambda: Lease(LeaseMode.RETAIN, 60.0))

    def view(self) -> ContextView:
        return ContextView(
            id=self.id,
            parent_id=self.parent_id,
            fork_position=self.fork_position,
            root_id=self.parent_id or self.id,
            depth=0 if self.parent_id is None else 1,
            length=len(self.tokens),
            num_computed=max(len(self.tokens) - 1, 0),
            private_blocks=1,
            shared_blocks=2,
            host_blocks=3,
            disk_blocks=4,
            residency=Residency.DEVICE,
            reclaimable_blocks=3,
            lease=self.lease,
            expire_time=1_700_000_060.5,
            has_head_logits=True,
            is_busy=False,
            num_children=0,
            labels=tuple(self.labels.items()),
            create_time=1_700_000_000.5,
        )


UpdateT = TypeVar("UpdateT")
Step = Callable[[], tuple[Update, ...]]


class FakeStream(Generic[UpdateT]):
    """Hands out steps one by one, when the engine's gate is open."""

    def __init__(
        self, engine: "FakeEngine", steps: Sequence[Callable[[], tuple[UpdateT, ...]]]
    ) -> None:
        self._engine = engine
        self._steps = list(steps)
        self._engine.open_streams.add(self)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        self._steps.clear()
        self._engine.open_streams.discard(self)
        if not self._engine.open_streams:
            self._engine.all_closed.set()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> tuple[UpdateT, ...]:
        if self._engine.steps_before_hold == 0:
            self._engine.steps_before_hold = None
            self._engine.gate.clear()
        await self._engine.pass_gate()
        if not self._steps:
            raise StopAsyncIteration
        if self._engine.steps_before_hold is not None:
            self._engine.steps_before_hold -= 1
        return self._steps.pop(0)()


class FakeEngine:
    """Answers like the engine, and does what a test tells it to.

    Attributes:
        failures: What a method raises instead of answering, by its name.
        chunk_text: Text of each generated token.
        branch_error: What the last branch of a generation ends with, if anything.
        gate: Generation waits while it is clear.
        steps_before_hold: Steps of a generation after which it closes the gate by itself. The
            server shares the loop with the client, and may be steps ahead of what is read.
        ended: Set when it serves no more; a test that sets it makes it fail.
        all_closed: Set when no stream is open any more.
        calls: Names of the methods called, in order.
    """

    def __init__(self) -> None:
        self.limits = LimitsConfig(max_fork_count=8, max_continuations=4)
        self.lease_limits = LeaseConfig()
        self.tokenizer = FakeTokenizer()
        self.facts = FACTS
        self.contexts: dict[str, FakeContext] = {}
        self.snapshots: dict[str, SnapshotView] = {}
        self.failures: dict[str, BaseException] = {}
        self.chunk_text = "x"
        self.branch_error: AgentKVError | None = None
        self.gate = asyncio.Event()
        self.gate.set()
        self.steps_before_hold: int | None = None
        self.waiting = asyncio.Event()
        self.open_streams: set[FakeStream[Any]] = set()
        self.all_closed = asyncio.Event()
        self.calls: list[str] = []
        self.is_stopped = False
        self.ended = asyncio.Event()
        self.num_made = 0

    async def start(self) -> None:
        self.calls.append("start")

    async def stop(self) -> None:
        self.calls.append("stop")
        self.is_stopped = True
        self.gate.set()
        self.ended.set()

    async def wait_ended(self) -> bool:
        await self.ended.wait()
        return self.is_stopped

    async def pass_gate(self) -> None:
        """Waits for a turn of the loop and for the gate; `waiting` tells that someone does."""
        if not self.gate.is_set():
            self.waiting.set()
        await asyncio.sleep(0)
        await self.gate.wait()
        if self.is_stopped:
            raise Unavailable("The server is shutting down.", reason=Reason.SHUTTING_DOWN)

    async def create(
        self,
        tenant: str,
        token_ids: Sequence[int],
        *,
        lease: LeaseTerms = DEFAULT_TERMS,
        labels: Mapping[str, str] = {},
        request_id: str | None = None,
        logprobs: bool = False,
        chat: Conversation | None = None,
        adapter: str = "",
    ) -> Committed:
        await self._begin("create")
        context = self._add(token_ids, labels=dict(labels))
        context.chat, context.chat_end = chat, len(context.tokens)
        return Committed(
            context.view(),
            Usage(computed_tokens=len(token_ids)),
            POOL,
            tuple(-0.25 for _ in token_ids[1:]) if logprobs else (),
        )

    async def fork(
        self,
        tenant: str,
        context_id: str,
        *,
        count: int = 1,
        at: int | None = None,
        lease: LeaseTerms | None = None,
        labels: Mapping[str, str] = {},
        request_id: str | None = None,
    ) -> Forked:
        await self._begin("fork")
        branches = self._fork(context_id, count, at, labels)
        return Forked(tuple(branch.view() for branch in branches), POOL)

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
        await self._begin("extend")
        context = self._find(context_id, expected_length)
        context.tokens.extend(token_ids)
        if chat is not None and context.chat is not None:
            context.chat = Conversation.joined([context.chat, chat])
            context.chat_end = len(context.tokens)
        return Committed(
            context.view(),
            Usage(computed_tokens=len(token_ids)),
            POOL,
            tuple(-0.5 for _ in token_ids) if logprobs else (),
        )

    async def compile(self, constraint: Constraint) -> Grammar | Continued:
        self.calls.append("compile")
        self._fail("compile")
        return Continued()  # no text of this fake's is constrained

    def generate(
        self,
        tenant: str,
        context_id: str,
        params: SamplingParams,
        *,
        expected_length: int | None = None,
        grammar: Grammar | Continued | None = None,
    ) -> FakeStream[Update]:
        self.calls.append("generate")

        def begin() -> tuple[Update, ...]:
            self._fail("generate")
            context = self._find(context_id, expected_length)
            stream._steps.extend(self._generation([context], params))
            return (Branches((context.view(),)),)

        stream = FakeStream[Update](self, [begin])
        return stream

    def generate_branches(
        self,
        tenant: str,
        context_id: str,
        count: int,
        params: SamplingParams,
        *,
        at: int | None = None,
        labels: Mapping[str, str] = {},
        grammar: Grammar | Continued | None = None,
    ) -> FakeStream[Update]:
        self.calls.append("generate_branches")

        def begin() -> tuple[Update, ...]:
            self._fail("generate_branches")
            branches = self._fork(context_id, count, at, labels)
            stream._steps.extend(self._generation(branches, params))
            return (Branches(tuple(branch.view() for branch in branches)),)

        stream = FakeStream[Update](self, [begin])
        return stream

    async def score(
        self, tenant: str, context_id: str, continuations: Sequence[Sequence[int]]
    ) -> Scores:
        await self._begin("score")
        self._find(context_id)
        scores = [ContinuationScore(tuple(ids), (-0.25,) * len(ids)) for ids in continuations]
        return Scores(tuple(scores), Usage(computed_tokens=sum(map(len, continuations))))

    async def truncate(
        self, tenant: str, context_id: str, length: int, *, expected_length: int | None = None
    ) -> Truncated:
        await self._begin("truncate")
        context = self._find(context_id, expected_length)
        self._check_position(context, length)
        del context.tokens[length:]
        return Truncated(context.view(), POOL)

    async def update_lease(
        self, tenant: str, context_id: str, terms: LeaseTerms, *, recursive: bool = False
    ) -> Leased:
        await self._begin("update_lease")
        context = self._find(context_id)
        reductions = (LeaseReduction.MAX_TTL,) if terms.may_reduce else ()
        context.lease = Lease(terms.mode or context.lease.mode, terms.ttl or 60.0, reductions)
        return Leased(context.view(), num_updated=2 if recursive else 1, pool=POOL)

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
        await self._begin("save")
        length = len(self._find(context_id).tokens)
        num_kv_tokens = length if with_kv else 0
        self.snapshots[name] = SnapshotView(
            name, 1_700_000_000.5, "fake", 1 + recursive, length, num_kv_tokens, 77 + overwrite
        )
        return Saved(self.snapshots[name], POOL)

    async def restore(
        self,
        tenant: str,
        name: str,
        *,
        with_kv: bool = True,
        lease: LeaseTerms | None = None,
        request_id: str | None = None,
    ) -> Restored:
        await self._begin("restore")
        context = FakeContext(f"restored by {request_id}", [1, 2, 3])
        if lease is not None and lease.mode is not None:
            context.lease = Lease(lease.mode, 60.0)
        num_kv_tokens = self.snapshots[name].num_kv_tokens if with_kv else 0
        return Restored((context.view(),), ("saved",), num_kv_tokens, "why not", POOL)

    async def list_snapshots(self, tenant: str) -> Sequence[SnapshotView]:
        await self._begin("list_snapshots")
        return list(self.snapshots.values())

    async def delete_snapshot(self, tenant: str, name: str) -> None:
        await self._begin("delete_snapshot")
        if self.snapshots.pop(name, None) is None:
            raise NotFound("None.", reason=Reason.SNAPSHOT_NOT_FOUND)

    def watch(self, tenant: str) -> "FakeStream[WatchUpdate]":
        self.calls.append("watch")

        def snapshot() -> tuple[WatchUpdate, ...]:
            views = tuple(context.view() for context in self.contexts.values())
            return (Snapshot(views, POOL, is_first=True, is_last=True, sequence=1),)

        def changes() -> tuple[WatchUpdate, ...]:
            (context,) = self.contexts.values()
            changes = [
                Change(kind, context.id, None, context.id, 0, 3, context.lease, None, sequence)
                for sequence, kind in enumerate(ChangeKind, start=2)
            ]
            return (*changes, PoolChange(POOL, len(changes) + 2))

        return FakeStream[WatchUpdate](self, [snapshot, changes])

    async def end_watches(self) -> None:
        self.calls.append("end_watches")

    async def release(
        self,
        tenant: str,
        context_ids: Sequence[str],
        *,
        recursive: bool = False,
        allow_missing: bool = False,
    ) -> Released:
        await self._begin("release")
        found = [context_id for context_id in context_ids if context_id in self.contexts]
        if len(found) < len(context_ids) and not allow_missing:
            raise NotFound("No such context.")
        for context_id in found:
            del self.contexts[context_id]
        return Released(num_released=len(found), blocks_freed=len(found), pool=POOL)

    async def get(self, tenant: str, context_id: str) -> ContextView:
        await self._begin("get")
        return self._find(context_id).view()

    async def chat(
        self, tenant: str, context_id: str, *, expected_length: int | None = None
    ) -> ChatState:
        await self._begin("chat")
        context = self._find(context_id, expected_length)
        if context.chat is None:
            raise InvalidRequest("No chat.", reason=Reason.CHAT_NOT_EXTENDABLE)
        turn_ids = tuple(context.tokens[context.chat_end :])
        return ChatState(context.chat, turn_ids, len(context.tokens))

    async def tokens(
        self, tenant: str, context_id: str, start: int = 0, *, limit: int | None = None
    ) -> ContextTokens:
        await self._begin("tokens")
        context = self._find(context_id)
        self._check_position(context, start)
        end = len(context.tokens) if limit is None else start + limit
        return ContextTokens(context.view(), tuple(context.tokens[start:end]))

    async def list(
        self, tenant: str, *, root_id: str | None = None, page_size: int = 100, page_token: str = ""
    ) -> ContextPage:
        await self._begin("list")
        views = [context.view() for context in self.contexts.values()]
        chosen = [view for view in views if root_id in (None, view.root_id)]
        start = int(page_token or 0)
        rest = start + page_size < len(chosen)
        return ContextPage(
            tuple(chosen[start : start + page_size]), str(start + page_size) if rest else ""
        )

    async def usage(
        self, tenant: str, *, context_id: str | None = None, root_id: str | None = None
    ) -> UsageView:
        await self._begin("usage")
        if context_id is not None:
            self._find(context_id)
        bill = Bill(computed_tokens=7, block_seconds=(1.5, 0.0, 0.0), saved_block_seconds=0.5)
        quotas = QuotaView(3, 9, 0.0, None, 60.0, len(self.contexts), 8, 4, None)
        tiers = (TierView(Tier.DEVICE, 3.0, 1.5, 1.5),)
        return UsageView(bill, len(self.contexts), tiers, quotas)

    async def view(self) -> EngineView:
        await self._begin("view")
        return EngineView(
            model=FACTS,
            pool=POOL,
            num_contexts=len(self.contexts),
            num_running=len(self.open_streams),
            num_waiting=0,
            computed_tokens=9,
            num_forks=3,
            num_block_copies=2,
            num_preemptions=1,
        )

    async def _begin(self, method: str) -> None:
        self.calls.append(method)
        self._fail(method)
        if method != "view":
            await self.pass_gate()

    def _fail(self, method: str) -> None:
        if method in self.failures:
            raise self.failures[method]

    def _add(self, tokens: Sequence[int], **facts: Any) -> FakeContext:
        context = FakeContext(id=f"c{self.num_made}", tokens=[*tokens], **facts)
        self.num_made += 1
        self.contexts[context.id] = context
        return context

    def _find(self, context_id: str, expected_length: int | None = None) -> FakeContext:
        if context_id not in self.contexts:
            raise NotFound("No such context.")
        context = self.contexts[context_id]
        if expected_length not in (None, len(context.tokens)):
            raise ContextMoved("Moved.", metadata={"actual_length": len(context.tokens)})
        return context

    def _check_position(self, context: FakeContext, position: int) -> None:
        if position > len(context.tokens):
            raise InvalidRequest("Beyond the end.", reason=Reason.POSITION_OUT_OF_RANGE)

    def _fork(
        self, context_id: str, count: int, at: int | None, labels: Mapping[str, str]
    ) -> tuple[FakeContext, ...]:
        parent = self._find(context_id)
        position = len(parent.tokens) if at is None else at
        self._check_position(parent, position)
        return tuple(
            self._add(
                parent.tokens[:position],
                parent_id=parent.id,
                fork_position=position,
                labels=dict(labels),
            )
            for _ in range(count)
        )

    def _generation(
        self, contexts: Sequence[FakeContext], params: SamplingParams
    ) -> tuple[Step, ...]:
        """Makes one step per token; the last one carries each branch's finish too."""

        def step(is_last: bool) -> tuple[Update, ...]:
            updates: list[Update] = []
            for branch, context in enumerate(contexts):
                token = (sum(context.tokens) + branch) % VOCAB_SIZE
                context.tokens.append(token)
                logprobs = (-1.5,) if params.logprobs else ()
                size = params.top_logprobs
                top = TopLogprobs(tuple(range(size)), tuple(-float(rank) for rank in range(size)))
                tops = (top,) if size else ()
                updates.append(Chunk(branch, (token,), self.chunk_text, logprobs, tops))
                if is_last:
                    updates.append(self._finish(branch, len(contexts), context, params))
            return tuple(updates)

        last = params.max_tokens - 1
        return tuple(partial(step, number == last) for number in range(params.max_tokens))

    def _finish(
        self, branch: int, count: int, context: FakeContext, params: SamplingParams
    ) -> Finish:
        failed = self.branch_error if branch == count - 1 else None
        return Finish(
            branch=branch,
            reason=FinishReason.LENGTH if failed is None else FinishReason.ERROR,
            context=context.view(),
            usage=Usage(generated_tokens=params.max_tokens),
            seed=params.seed,
            error=failed,
            pool=POOL,
        )
