"""A ContextService in memory behind a real gRPC server, with faults on request.

A token is a byte of the text. The model writes the alphabet: the token at position i is the letter
number i modulo 26. No blocks, no tensors.
"""

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import grpc

from agentkv import status
from agentkv.errors import AgentKVError, ContextMoved, InvalidRequest, NotFound, Reason
from agentkv.v1 import agentkv_pb2 as pb
from agentkv.v1 import agentkv_pb2_grpc as pb_grpc

ReplyT = TypeVar("ReplyT")

BLOCK_SIZE = 4
MAX_PAGE = 2
MAX_TOKENS = 4


@dataclass
class Fault:
    """How one call goes wrong."""

    error: AgentKVError | grpc.StatusCode
    is_late: bool = False
    """Whether the work is done first, so that only the answer is lost."""
    after_messages: int = 0
    """Messages of a stream that are sent before it."""


class Hang(Fault):
    """The call is not answered until the client gives up."""

    def __init__(self, after_messages: int = 0) -> None:
        super().__init__(grpc.StatusCode.CANCELLED, after_messages=after_messages)


@dataclass
class FakeContext:
    """One context: its tokens and what the wire shows of it."""

    tokens: list[int]
    parent_id: str | None = None
    root_id: str = ""
    fork_position: int = 0
    labels: dict[str, str] = field(default_factory=dict)
    lease: pb.Lease = field(default_factory=lambda: _lease(pb.LeaseOptions()))
    num_busy_looks: int = 0
    """How many more times it shows itself as busy."""


class FakeService(pb_grpc.ContextServiceServicer):
    """Answers every method; `faults[method]` are used up one by one, in order."""

    def __init__(self) -> None:
        self.contexts: dict[str, FakeContext] = {}
        self.calls: list[tuple[str, Any]] = []
        self.faults: dict[str, deque[Fault]] = defaultdict(deque)
        self.replies: dict[str, Any] = {}
        self.snapshots: dict[str, str] = {}
        """Handles of what was saved, by name."""
        self.hangs = threading.Event()
        """Set when a call has come to its Hang."""
        self.was_cancelled = threading.Event()
        """Set when a call with a Hang is over for the client."""
        self.ends_early = False
        """Whether Generate ends well, but without a finish."""
        self._num_made = 0

    def requests(self, method: str) -> list[Any]:
        """Lists the requests of one method, in order of arrival."""
        return [request for name, request in self.calls if name == method]

    def Create(self, request: pb.CreateRequest, rpc: Any) -> pb.CreateResponse:
        with self._handling("Create", request, rpc):
            return self._once(request.request_id, lambda: self._create(request))

    def Fork(self, request: pb.ForkRequest, rpc: Any) -> pb.ForkResponse:
        with self._handling("Fork", request, rpc):
            return self._once(
                request.request_id,
                lambda: pb.ForkResponse(contexts=self._fork(request), pool=self._pool()),
            )

    def Extend(self, request: pb.ExtendRequest, rpc: Any) -> pb.ExtendResponse:
        with self._handling("Extend", request, rpc):
            context = self._at(request)
            tokens = _tokens(request)
            context.tokens.extend(tokens)
            return pb.ExtendResponse(
                context=self._view(request.context_id),
                usage=pb.Usage(computed_tokens=len(tokens)),
                pool=self._pool(),
                logprobs=[-0.5] * len(tokens) if request.logprobs else [],
            )

    def Generate(self, request: pb.GenerateRequest, rpc: Any) -> Iterator[pb.GenerateResponse]:
        with self._handling("Generate", request, rpc) as fault:
            context = self._at(request)
            for number in range(request.sampling.max_tokens):
                self._maybe_fail(fault, number, rpc)
                yield pb.GenerateResponse(chunk=_step(context, 0, request.sampling))
            if self.ends_early:
                return
            yield pb.GenerateResponse(
                finish=self._finish(0, request.context_id, request.sampling.max_tokens)
            )

    def GenerateBranches(
        self, request: pb.GenerateBranchesRequest, rpc: Any
    ) -> Iterator[pb.GenerateBranchesResponse]:
        with self._handling("GenerateBranches", request, rpc) as fault:
            branches = self._fork(request)
            yield pb.GenerateBranchesResponse(contexts=branches)
            for number in range(request.sampling.max_tokens):
                self._maybe_fail(fault, number + 1, rpc)
                chunks = [
                    _step(self.contexts[branch.id], index, request.sampling)
                    for index, branch in enumerate(branches)
                ]
                yield pb.GenerateBranchesResponse(chunks=chunks)
            for index, branch in enumerate(branches):
                finish = self._finish(index, branch.id, request.sampling.max_tokens)
                if branch.labels.get("fails") == str(index):
                    finish.reason = pb.FINISH_REASON_ERROR
                    finish.error.reason = "KV_BLOCKS_EXHAUSTED"
                    finish.error.metadata["need"] = "3"
                    finish.error.retry_after = 1.5
                yield pb.GenerateBranchesResponse(finishes=[finish])

    def Score(self, request: pb.ScoreRequest, rpc: Any) -> pb.ScoreResponse:
        with self._handling("Score", request, rpc):
            scores = [
                pb.ContinuationScore(
                    token_ids=_tokens(item),
                    logprobs=[-0.5] * len(_tokens(item)),
                    total=-0.5 * len(_tokens(item)),
                )
                for item in request.continuations
            ]
            return pb.ScoreResponse(scores=scores, usage=pb.Usage(computed_tokens=1))

    def Truncate(self, request: pb.TruncateRequest, rpc: Any) -> pb.TruncateResponse:
        with self._handling("Truncate", request, rpc):
            del self._at(request).tokens[request.length :]
            return pb.TruncateResponse(context=self._view(request.context_id), pool=self._pool())

    def UpdateLease(self, request: pb.UpdateLeaseRequest, rpc: Any) -> pb.UpdateLeaseResponse:
        with self._handling("UpdateLease", request, rpc):
            self._find(request.context_id).lease = _lease(request.lease)
            return pb.UpdateLeaseResponse(
                context=self._view(request.context_id), num_updated=1, pool=self._pool()
            )

    def Watch(self, request: pb.WatchRequest, rpc: Any) -> Iterator[pb.WatchResponse]:
        with self._handling("Watch", request, rpc) as fault:
            ids = list(self.contexts)
            for number, id in enumerate(ids, start=1):
                snapshot = pb.WatchSnapshot(
                    contexts=[self._view(id)],
                    pool=self._pool(),
                    is_first=number == 1,
                    is_last=number == len(ids),
                )
                yield pb.WatchResponse(events=[pb.WatchEvent(sequence=number, snapshot=snapshot)])
            change = pb.ContextChange(
                kind=pb.CHANGE_KIND_EXPIRING, context_id=ids[0], root_id=ids[0], length=3
            )
            events = [
                pb.WatchEvent(sequence=len(ids) + 1, change=change),
                pb.WatchEvent(sequence=len(ids) + 2, pressure=self._pool()),
            ]
            yield pb.WatchResponse(events=events)
            self._maybe_fail(fault, len(ids) + 1, rpc)

    def Save(self, request: pb.SaveRequest, rpc: Any) -> pb.SaveResponse:
        with self._handling("Save", request, rpc):
            self.snapshots[request.name] = request.context_id
            return pb.SaveResponse(snapshot=self._snapshot(request.name), pool=self._pool())

    def Restore(self, request: pb.RestoreRequest, rpc: Any) -> pb.RestoreResponse:
        """Answers with a copy of the saved context, and one branch of it."""

        def work() -> pb.RestoreResponse:
            if request.name not in self.snapshots:
                raise NotFound("No such snapshot.", reason=Reason.SNAPSHOT_NOT_FOUND)
            saved_id = self.snapshots[request.name]
            root_id, id = self._new_id(), self._new_id()
            tokens = self._find(saved_id).tokens
            self.contexts[root_id] = FakeContext(list(tokens), root_id=root_id)
            self.contexts[id] = FakeContext(list(tokens), root_id, root_id, 1)
            return pb.RestoreResponse(
                contexts=[self._view(root_id), self._view(id)],
                saved_ids=[saved_id, "its branch"],
                num_kv_tokens=len(tokens),
                kv_refusal="no room",
                pool=self._pool(),
            )

        with self._handling("Restore", request, rpc):
            return self._once(request.request_id, work)

    def ListSnapshots(self, request: pb.ListSnapshotsRequest, rpc: Any) -> pb.ListSnapshotsResponse:
        with self._handling("ListSnapshots", request, rpc):
            found = [self._snapshot(name) for name in sorted(self.snapshots)]
            return pb.ListSnapshotsResponse(snapshots=found)

    def DeleteSnapshot(
        self, request: pb.DeleteSnapshotRequest, rpc: Any
    ) -> pb.DeleteSnapshotResponse:
        with self._handling("DeleteSnapshot", request, rpc):
            assert request.allow_missing
            self.snapshots.pop(request.name, None)
            return pb.DeleteSnapshotResponse()

    def _snapshot(self, name: str) -> pb.Snapshot:
        snapshot = pb.Snapshot(
            name=name,
            model_name="alphabet",
            num_contexts=2,
            num_tokens=3,
            num_kv_tokens=2,
            num_bytes=4096,
        )
        snapshot.create_time.FromSeconds(1_700_000_000)
        return snapshot

    def Release(self, request: pb.ReleaseRequest, rpc: Any) -> pb.ReleaseResponse:
        with self._handling("Release", request, rpc):
            assert request.allow_missing
            gone = [id for id in request.context_ids if self.contexts.pop(id, None)]
            return pb.ReleaseResponse(num_released=len(gone), pool=self._pool())

    def Get(self, request: pb.GetRequest, rpc: Any) -> pb.GetResponse:
        with self._handling("Get", request, rpc):
            tokens = self._find(request.context_id).tokens
            start = request.tokens_from if request.HasField("tokens_from") else len(tokens)
            return pb.GetResponse(
                context=self._view(request.context_id),
                token_ids=tokens[start : start + MAX_TOKENS],
            )

    def List(self, request: pb.ListRequest, rpc: Any) -> pb.ListResponse:
        with self._handling("List", request, rpc):
            ids = [
                id
                for id, context in self.contexts.items()
                if not request.HasField("root_id") or context.root_id == request.root_id
            ]
            start = int(request.page_token or "0")
            end = start + MAX_PAGE
            return pb.ListResponse(
                contexts=[self._view(id) for id in ids[start:end]],
                next_page_token=str(end) if end < len(ids) else "",
            )

    def GetUsage(self, request: pb.GetUsageRequest, rpc: Any) -> pb.GetUsageResponse:
        with self._handling("GetUsage", request, rpc):
            if request.HasField("context_id"):
                self._find(request.context_id)
            return pb.GetUsageResponse(
                bill=pb.Bill(
                    computed_tokens=11,
                    reused_tokens=22,
                    generated_tokens=33,
                    recomputed_tokens=4,
                    block_copies=5,
                    device_block_seconds=6.5,
                    host_block_seconds=7.5,
                    disk_block_seconds=8.5,
                    saved_block_seconds=9.5,
                ),
                num_contexts=len(self.contexts),
                quotas=pb.Quotas(
                    blocks=3, max_blocks=40, window=60.0, contexts=2, max_contexts=8, max_depth=5
                ),
                tiers=[
                    pb.TierUsage(
                        tier=pb.TIER_DEVICE,
                        taken_block_seconds=10.0,
                        held_block_seconds=6.5,
                        unheld_block_seconds=3.5,
                    )
                ],
            )

    def GetServerInfo(self, request: pb.GetServerInfoRequest, rpc: Any) -> pb.GetServerInfoResponse:
        with self._handling("GetServerInfo", request, rpc):
            return pb.GetServerInfoResponse(
                server_version="9.8.7",
                api_versions=["agentkv.v1"],
                model=pb.Model(
                    name="alphabet",
                    architecture="Alphabet",
                    vocab_size=256,
                    max_length=8192,
                    num_layers=2,
                    dtype="float32",
                    bytes_per_block=2048,
                    has_chat_template=True,
                ),
                pool=self._pool(),
                limits=pb.Limits(max_contexts=100, max_deadline=600.0),
                sampling_options=["max_tokens"],
                counters=pb.Counters(num_contexts=len(self.contexts), num_forks=3),
            )

    # -- inside ------------------------------------------------------------------------------

    @contextmanager
    def _handling(self, method: str, request: Any, rpc: Any) -> Iterator[Fault | None]:
        """Records the call, and ends it as its fault says or as what is raised inside says."""
        self.calls.append((method, request))
        fault = self.faults[method].popleft() if self.faults[method] else None
        if isinstance(fault, Hang) and not rpc.add_callback(self.was_cancelled.set):
            self.was_cancelled.set()  # it is over already
        try:
            if fault and not fault.is_late and not fault.after_messages:
                self._fail(fault, rpc)
            yield fault
            if fault and fault.is_late:
                self._fail(fault, rpc)
        except AgentKVError as error:
            _abort(error, rpc)

    def _maybe_fail(self, fault: Fault | None, number: int, rpc: Any) -> None:
        if fault and fault.after_messages == number:
            self._fail(fault, rpc)

    def _fail(self, fault: Fault, rpc: Any) -> None:
        if isinstance(fault, Hang):
            self.hangs.set()
            self.was_cancelled.wait(5)
        _abort(fault.error, rpc)

    def _once(self, request_id: str, work: Callable[[], ReplyT]) -> ReplyT:
        assert request_id
        if request_id not in self.replies:
            self.replies[request_id] = work()
        reply: ReplyT = self.replies[request_id]
        return reply

    def _create(self, request: pb.CreateRequest) -> pb.CreateResponse:
        tokens = _tokens(request)
        id = self._new_id()
        self.contexts[id] = FakeContext(tokens, root_id=id, labels=dict(request.labels))
        usage = pb.Usage(computed_tokens=len(tokens) - 1, cached_tokens=1)
        return pb.CreateResponse(
            context=self._view(id),
            usage=usage,
            pool=self._pool(),
            logprobs=[-0.25] * (len(tokens) - 1) if request.logprobs else [],
        )

    def _fork(self, request: pb.ForkRequest | pb.GenerateBranchesRequest) -> list[pb.Context]:
        parent = self._find(request.context_id)
        at = request.at if request.HasField("at") else len(parent.tokens)
        ids = [self._new_id() for _ in range(request.count)]
        for id in ids:
            self.contexts[id] = FakeContext(
                parent.tokens[:at],
                parent_id=request.context_id,
                root_id=parent.root_id,
                fork_position=at,
                labels=dict(request.labels),
            )
        return [self._view(id) for id in ids]

    def _new_id(self) -> str:
        self._num_made += 1
        return f"r1.context-{self._num_made}"

    def _find(self, id: str) -> FakeContext:
        if id not in self.contexts:
            raise NotFound(f"There is no context {id}.")
        return self.contexts[id]

    def _at(
        self, request: pb.ExtendRequest | pb.GenerateRequest | pb.TruncateRequest
    ) -> FakeContext:
        context = self._find(request.context_id)
        if request.HasField("expected_length") and request.expected_length != len(context.tokens):
            raise ContextMoved("Moved.", metadata={"actual_length": len(context.tokens)})
        return context

    def _view(self, id: str) -> pb.Context:
        context = self._find(id)
        context.num_busy_looks -= 1
        view = pb.Context(
            id=id,
            parent_id=context.parent_id,
            fork_position=context.fork_position,
            root_id=context.root_id,
            depth=0 if context.parent_id is None else 1,
            length=len(context.tokens),
            num_computed_tokens=len(context.tokens),
            private_blocks=1,
            shared_blocks=context.fork_position // BLOCK_SIZE,
            residency=pb.RESIDENCY_DEVICE,
            busy=context.num_busy_looks >= 0,
            labels=context.labels,
            reclaimable_blocks=1,
        )
        view.create_time.FromSeconds(1_700_000_000)
        view.lease.CopyFrom(context.lease)
        return view

    def _pool(self) -> pb.Pool:
        live = min(len(self.contexts), 60)
        return pb.Pool(
            total_blocks=64,
            free_blocks=60 - live,
            live_blocks=live,
            cached_blocks=4,
            block_size=BLOCK_SIZE,
            used_slots=live,
            reclaimable_blocks=4,
            level=pb.PRESSURE_LEVEL_OK,
            host_total_blocks=8,
            host_free_blocks=5,
            host_live_blocks=3,
            disk_total_blocks=4,
            disk_free_blocks=2,
            disk_live_blocks=2,
        )

    def _finish(self, branch: int, id: str, generated: int) -> pb.Finish:
        return pb.Finish(
            branch=branch,
            reason=pb.FINISH_REASON_LENGTH,
            context=self._view(id) if id in self.contexts else None,
            usage=pb.Usage(computed_tokens=generated, generated_tokens=generated),
            seed=7 + branch,
            pool=self._pool(),
        )


@contextmanager
def serving(service: FakeService) -> Iterator[str]:
    """Serves on a loopback port while the block runs, and gives its address."""
    server = grpc.server(futures.ThreadPoolExecutor(max_workers=8))
    pb_grpc.add_ContextServiceServicer_to_server(service, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(None).wait()


def _lease(options: pb.LeaseOptions) -> pb.Lease:
    """Grants what was asked for, but at most 100 s."""
    ttl = options.ttl if options.HasField("ttl") else 60.0
    lease = pb.Lease(mode=options.mode or pb.LEASE_MODE_RETAIN, ttl=min(ttl, 100.0))
    lease.expire_time.FromSeconds(1_700_000_000 + int(lease.ttl))
    if ttl > 100.0:
        lease.reductions.append(pb.LEASE_REDUCTION_MAX_TTL)
    return lease


def _step(context: FakeContext, branch: int, sampling: pb.SamplingOptions) -> pb.Chunk:
    token = ord("a") + len(context.tokens) % 26
    context.tokens.append(token)
    return pb.Chunk(
        branch=branch,
        token_ids=[token],
        text=chr(token),
        logprobs=[-0.25] if sampling.logprobs else [],
        top_logprobs=[pb.TopLogprobs(token_ids=[token], logprobs=[-0.25])]
        if sampling.top_logprobs
        else [],
    )


def _tokens(request: pb.CreateRequest | pb.ExtendRequest | pb.Continuation) -> list[int]:
    if isinstance(request, pb.CreateRequest) and request.HasField("messages"):
        turns = request.messages.messages
        return list("".join(f"<{turn.role}>{turn.content}" for turn in turns).encode())
    tokens = list(request.token_ids.ids) if request.HasField("token_ids") else request.text.encode()
    if not tokens:
        raise InvalidRequest("Empty.", violations={"text": "must not be empty"})
    return list(tokens)


def _abort(error: AgentKVError | grpc.StatusCode, rpc: Any) -> None:
    """Ends a call like a server of ours, or like gRPC itself."""
    if isinstance(error, grpc.StatusCode):
        rpc.abort(error, "scripted")
    else:
        rpc.set_trailing_metadata(status.trailing_metadata(error))
        rpc.abort(status.code_of(error), status.to_status(error).message)
