"""The servicer: checks, translates, calls the engine, translates back. It never decides.

It raises AgentKVErrors as they come; `agentkv.server.interceptors` turns them into statuses. It
knows no tree, no block and no scheduler.
"""

from importlib.metadata import PackageNotFoundError, version

from google.protobuf.message import Message

from agentkv.config import ServerConfig
from agentkv.constraint import Constraint, Continued
from agentkv.core.lease import DEFAULT_TERMS
from agentkv.engine.grammar import Grammar
from agentkv.engine.outputs import Finish, Update
from agentkv.errors import NotFound
from agentkv.server.checks import MAX_TOKENS_READ, Checks
from agentkv.server.convert import (
    answers,
    billing,
    generation,
    server_info,
    snapshots,
    watching,
)
from agentkv.server.encoding import encode_extension, encode_inputs, encode_prompt
from agentkv.server.inputs import ChatInput
from agentkv.server.served_engine import ServedEngine
from agentkv.server.streams import relay
from agentkv.server.tenant import Rpc, tenant_of
from agentkv.v1 import agentkv_pb2 as pb
from agentkv.v1 import agentkv_pb2_grpc as pb_grpc


class ContextService(pb_grpc.ContextServiceServicer):
    """Serves one engine.

    The docstring of each method is the comment of its RPC in the contract.
    """

    def __init__(self, engine: ServedEngine, config: ServerConfig) -> None:
        self._engine = engine
        self._config = config

    async def Create(self, request: pb.CreateRequest, rpc: Rpc) -> pb.CreateResponse:
        """Creates a context from a prompt."""
        checks = self._checks(request)
        prompt = checks.inputs.prompt(request)
        lease = checks.lease(request)
        labels = checks.labels(request.labels)
        request_id = checks.request_id(request.request_id)
        checks.finish()
        token_ids = await encode_prompt(self._engine.tokenizer, prompt, checks)
        committed = await self._engine.create(
            tenant_of(rpc),
            token_ids,
            lease=lease or DEFAULT_TERMS,
            labels=labels,
            request_id=request_id,
            logprobs=request.logprobs,
            chat=prompt.chat if isinstance(prompt, ChatInput) else None,
            adapter=request.adapter,
        )
        return answers.created(committed)

    async def Fork(self, request: pb.ForkRequest, rpc: Rpc) -> pb.ForkResponse:
        """Makes branches of a context."""
        checks = self._checks(request)
        context_id = checks.context_id(request.context_id)
        count = checks.count(request)
        lease = checks.lease(request)
        labels = checks.labels(request.labels)
        request_id = checks.request_id(request.request_id)
        checks.finish()
        forked = await self._engine.fork(
            tenant_of(rpc),
            context_id,
            count=count,
            at=request.at if request.HasField("at") else None,
            lease=lease,
            labels=labels,
            request_id=request_id,
        )
        return pb.ForkResponse(
            contexts=[answers.context(context) for context in forked.contexts],
            pool=answers.pool(forked.pool),
        )

    async def Extend(self, request: pb.ExtendRequest, rpc: Rpc) -> pb.ExtendResponse:
        """Appends tokens to a context."""
        checks = self._checks(request)
        context_id = checks.context_id(request.context_id)
        extension = checks.inputs.extension(request)
        checks.finish()
        encoded = await encode_extension(
            self._engine, tenant_of(rpc), context_id, extension, _expected_length(request), checks
        )
        committed = await self._engine.extend(
            tenant_of(rpc),
            context_id,
            encoded.token_ids,
            expected_length=encoded.expected_length,
            logprobs=request.logprobs,
            chat=encoded.chat,
        )
        return answers.extended(committed)

    async def Generate(  # type: ignore[override]  # the stub knows no coroutine that writes
        self, request: pb.GenerateRequest, rpc: Rpc
    ) -> None:
        """Generates on a context, one message per engine step."""
        checks = self._checks(request)
        context_id = checks.context_id(request.context_id)
        params = checks.sampling(request.sampling)
        constraint = checks.constraint(request)
        checks.finish()
        stream = self._engine.generate(
            tenant_of(rpc),
            context_id,
            params,
            expected_length=_expected_length(request),
            grammar=await self._grammar(constraint),
        )
        failures: list[Finish] = []

        def translate(step: tuple[Update, ...]) -> pb.GenerateResponse | None:
            ended = [item for item in step if isinstance(item, Finish) and item.error is not None]
            failures.extend(ended)
            message = generation.generated([item for item in step if item not in ended])
            return message if message.ListFields() else None

        await relay(stream, rpc, translate, stall_timeout=self._config.stall_timeout)
        for failure in failures:
            assert failure.error is not None
            raise failure.error

    async def GenerateBranches(  # type: ignore[override]  # as Generate
        self, request: pb.GenerateBranchesRequest, rpc: Rpc
    ) -> None:
        """Forks a context and generates on every branch, in one stream."""
        checks = self._checks(request)
        context_id = checks.context_id(request.context_id)
        count = checks.count(request)
        params = checks.sampling(request.sampling)
        labels = checks.labels(request.labels)
        constraint = checks.constraint(request)
        checks.finish()
        stream = self._engine.generate_branches(
            tenant_of(rpc),
            context_id,
            count,
            params,
            at=request.at if request.HasField("at") else None,
            labels=labels,
            grammar=await self._grammar(constraint),
        )
        await relay(
            stream, rpc, generation.branches_generated, stall_timeout=self._config.stall_timeout
        )

    async def Score(self, request: pb.ScoreRequest, rpc: Rpc) -> pb.ScoreResponse:
        """Computes log-probabilities of continuations."""
        checks = self._checks(request)
        context_id = checks.context_id(request.context_id)
        continuations = checks.inputs.continuations(request)
        checks.finish()
        token_ids = await encode_inputs(
            self._engine.tokenizer, continuations, lambda i: f"continuations[{i}].text", checks
        )
        scores = await self._engine.score(tenant_of(rpc), context_id, token_ids)
        return pb.ScoreResponse(
            scores=[answers.score(score) for score in scores.scores],
            usage=answers.usage(scores.usage),
        )

    async def Truncate(self, request: pb.TruncateRequest, rpc: Rpc) -> pb.TruncateResponse:
        """Drops the last tokens of a context."""
        checks = self._checks(request)
        context_id = checks.context_id(request.context_id)
        length = checks.length(request)
        checks.finish()
        truncated = await self._engine.truncate(
            tenant_of(rpc), context_id, length, expected_length=_expected_length(request)
        )
        return pb.TruncateResponse(
            context=answers.context(truncated.context), pool=answers.pool(truncated.pool)
        )

    async def UpdateLease(self, request: pb.UpdateLeaseRequest, rpc: Rpc) -> pb.UpdateLeaseResponse:
        """Renews or replaces the lease of a context."""
        checks = self._checks(request)
        context_id = checks.context_id(request.context_id)
        terms = checks.lease(request) or DEFAULT_TERMS
        checks.finish()
        leased = await self._engine.update_lease(
            tenant_of(rpc), context_id, terms, recursive=request.recursive
        )
        return pb.UpdateLeaseResponse(
            context=answers.context(leased.context),
            num_updated=leased.num_updated,
            pool=answers.pool(leased.pool),
        )

    async def Save(self, request: pb.SaveRequest, rpc: Rpc) -> pb.SaveResponse:
        """Saves a context or a tree."""
        checks = self._checks(request)
        context_id = checks.context_id(request.context_id)
        name = checks.snapshot_name(request.name)
        checks.finish()
        saved = await self._engine.save(
            tenant_of(rpc),
            context_id,
            name,
            recursive=request.recursive,
            with_kv=not request.tokens_only,
            overwrite=request.overwrite,
        )
        return pb.SaveResponse(
            snapshot=snapshots.snapshot(saved.snapshot), pool=answers.pool(saved.pool)
        )

    async def Restore(self, request: pb.RestoreRequest, rpc: Rpc) -> pb.RestoreResponse:
        """Makes contexts of a snapshot."""
        checks = self._checks(request)
        name = checks.snapshot_name(request.name)
        lease = checks.lease(request)
        request_id = checks.request_id(request.request_id)
        checks.finish()
        restored = await self._engine.restore(
            tenant_of(rpc),
            name,
            with_kv=not request.tokens_only,
            lease=lease,
            request_id=request_id,
        )
        return snapshots.restored(restored)

    async def ListSnapshots(
        self, request: pb.ListSnapshotsRequest, rpc: Rpc
    ) -> pb.ListSnapshotsResponse:
        """Lists the caller's snapshots."""
        self._checks(request).finish()
        found = await self._engine.list_snapshots(tenant_of(rpc))
        return pb.ListSnapshotsResponse(snapshots=[snapshots.snapshot(item) for item in found])

    async def DeleteSnapshot(
        self, request: pb.DeleteSnapshotRequest, rpc: Rpc
    ) -> pb.DeleteSnapshotResponse:
        """Removes a snapshot."""
        checks = self._checks(request)
        name = checks.snapshot_name(request.name)
        checks.finish()
        try:
            await self._engine.delete_snapshot(tenant_of(rpc), name)
        except NotFound:
            if not request.allow_missing:
                raise
        return pb.DeleteSnapshotResponse()

    async def Release(self, request: pb.ReleaseRequest, rpc: Rpc) -> pb.ReleaseResponse:
        """Releases contexts."""
        checks = self._checks(request)
        context_ids = checks.context_ids(request.context_ids)
        checks.finish()
        released = await self._engine.release(
            tenant_of(rpc),
            context_ids,
            recursive=request.recursive,
            allow_missing=request.allow_missing,
        )
        return pb.ReleaseResponse(
            num_released=released.num_released,
            blocks_freed=released.blocks_freed,
            pool=answers.pool(released.pool),
        )

    async def Get(self, request: pb.GetRequest, rpc: Rpc) -> pb.GetResponse:
        """Describes one context, and reads its tokens when asked."""
        checks = self._checks(request)
        context_id = checks.context_id(request.context_id)
        checks.finish()
        if not request.HasField("tokens_from"):
            context = await self._engine.get(tenant_of(rpc), context_id)
            return pb.GetResponse(context=answers.context(context))
        read = await self._engine.tokens(
            tenant_of(rpc), context_id, request.tokens_from, limit=MAX_TOKENS_READ
        )
        return pb.GetResponse(context=answers.context(read.context), token_ids=read.token_ids)

    async def List(self, request: pb.ListRequest, rpc: Rpc) -> pb.ListResponse:
        """Lists the caller's contexts, page by page."""
        checks = self._checks(request)
        has_root = request.HasField("root_id")
        root_id = checks.context_id(request.root_id, "root_id") if has_root else None
        page_size = checks.page_size(request)
        page_token = checks.page_token(request.page_token)
        checks.finish()
        page = await self._engine.list(
            tenant_of(rpc), root_id=root_id, page_size=page_size, page_token=page_token
        )
        return pb.ListResponse(
            contexts=[answers.context(context) for context in page.contexts],
            next_page_token=page.next_page_token,
        )

    async def Watch(  # type: ignore[override]  # as Generate
        self, request: pb.WatchRequest, rpc: Rpc
    ) -> None:
        """Tells what happens to the caller's contexts."""
        self._checks(request).finish()
        stream = self._engine.watch(tenant_of(rpc))
        await relay(stream, rpc, watching.watched, stall_timeout=self._config.stall_timeout)

    async def GetUsage(self, request: pb.GetUsageRequest, rpc: Rpc) -> pb.GetUsageResponse:
        """Tells what one context, one tree or the whole tenant has used."""
        checks = self._checks(request)
        context_id = root_id = None
        match request.WhichOneof("scope"):
            case "context_id":
                context_id = checks.context_id(request.context_id)
            case "root_id":
                root_id = checks.context_id(request.root_id, "root_id")
        checks.finish()
        view = await self._engine.usage(tenant_of(rpc), context_id=context_id, root_id=root_id)
        return billing.usage_view(view)

    async def GetServerInfo(
        self, request: pb.GetServerInfoRequest, rpc: Rpc
    ) -> pb.GetServerInfoResponse:
        """Describes the server."""
        self._checks(request).finish()
        view = await self._engine.view()
        return pb.GetServerInfoResponse(
            server_version=_server_version(),
            api_versions=[pb.DESCRIPTOR.package],
            model=server_info.model(self._engine.facts),
            pool=answers.pool(view.pool),
            limits=server_info.limits(
                self._engine.limits,
                self._engine.lease_limits,
                self._config,
                self._engine.facts,
                view.pool.total,
            ),
            sampling_options=[field.name for field in pb.SamplingOptions.DESCRIPTOR.fields],
            counters=server_info.counters(view),
        )

    async def _grammar(self, constraint: Constraint | None) -> Grammar | Continued | None:
        return None if constraint is None else await self._engine.compile(constraint)

    def _checks(self, request: Message) -> Checks:
        return Checks(request, self._engine.limits, self._engine.facts)


def _expected_length(
    request: pb.ExtendRequest | pb.GenerateRequest | pb.TruncateRequest,
) -> int | None:
    return request.expected_length if request.HasField("expected_length") else None


def _server_version() -> str:
    try:
        return version("agentkv-runtime")
    except PackageNotFoundError:  # run from a source tree that is not installed
        return "unknown"
