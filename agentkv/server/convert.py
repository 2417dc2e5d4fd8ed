"""The engine's values as messages. It copies numbers; what they mean stands in the contract.

The way in, from messages to values, is `agentkv.server.checks`.
"""

from collections.abc import Sequence
from types import MappingProxyType
from typing import Final

from agentkv.config import LeaseConfig, LimitsConfig, ServerConfig
from agentkv.core.bill import Bill
from agentkv.core.block_move import Tier
from agentkv.core.disk_statistics import DiskStatistics
from agentkv.core.lease import Lease, LeaseReduction
from agentkv.core.pressure import PressureLevel
from agentkv.core.quotas import QuotaView
from agentkv.core.request import FinishReason
from agentkv.core.usage_view import UsageView
from agentkv.core.views import ContextView, PoolView, Residency, Usage
from agentkv.core.watch import Change, ChangeKind, PoolChange, Snapshot, WatchUpdate
from agentkv.engine.outputs import (
    Branches,
    Chunk,
    Committed,
    ContinuationScore,
    EngineView,
    Finish,
    ModelFacts,
    Restored,
    SnapshotView,
    Update,
)
from agentkv.errors import AgentKVError, PoolExhausted
from agentkv.server import checks
from agentkv.v1 import agentkv_pb2 as pb

RESIDENCIES: Final = MappingProxyType(
    {
        Residency.DEVICE: pb.RESIDENCY_DEVICE,
        Residency.HOST: pb.RESIDENCY_HOST,
        Residency.DISK: pb.RESIDENCY_DISK,
        Residency.PARTIAL: pb.RESIDENCY_PARTIAL,
        Residency.NONE: pb.RESIDENCY_NONE,
    }
)
LEASE_MODES: Final = MappingProxyType(
    {mode: value for value, mode in checks.LEASE_MODES.items() if mode is not None}
)
REDUCTIONS: Final = MappingProxyType(
    {
        LeaseReduction.PIN_QUOTA: pb.LEASE_REDUCTION_PIN_QUOTA,
        LeaseReduction.MAX_TTL: pb.LEASE_REDUCTION_MAX_TTL,
    }
)
PRESSURE_LEVELS: Final = MappingProxyType(
    {
        PressureLevel.OK: pb.PRESSURE_LEVEL_OK,
        PressureLevel.SOFT: pb.PRESSURE_LEVEL_SOFT,
        PressureLevel.HARD: pb.PRESSURE_LEVEL_HARD,
    }
)
CHANGE_KINDS: Final = MappingProxyType(
    {
        ChangeKind.CREATED: pb.CHANGE_KIND_CREATED,
        ChangeKind.FORKED: pb.CHANGE_KIND_FORKED,
        ChangeKind.RELEASED: pb.CHANGE_KIND_RELEASED,
        ChangeKind.RESIZED: pb.CHANGE_KIND_RESIZED,
        ChangeKind.LEASED: pb.CHANGE_KIND_LEASED,
        ChangeKind.EXPIRING: pb.CHANGE_KIND_EXPIRING,
        ChangeKind.EXPIRED: pb.CHANGE_KIND_EXPIRED,
        ChangeKind.EVICTED: pb.CHANGE_KIND_EVICTED,
        ChangeKind.PARKED: pb.CHANGE_KIND_PARKED,
        ChangeKind.RESTORED: pb.CHANGE_KIND_RESTORED,
    }
)
TIERS: Final = MappingProxyType(
    {
        Tier.DEVICE: pb.TIER_DEVICE,
        Tier.HOST: pb.TIER_HOST,
        Tier.DISK: pb.TIER_DISK,
    }
)
FINISH_REASONS: Final = MappingProxyType(
    {
        FinishReason.STOP: pb.FINISH_REASON_STOP,
        FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
        FinishReason.ERROR: pb.FINISH_REASON_ERROR,
        FinishReason.DEAD_END: pb.FINISH_REASON_DEAD_END,
        FinishReason.TOOL_CALL: pb.FINISH_REASON_TOOL_CALL,
    }
)


def lease(value: Lease, expire_time: float | None) -> pb.Lease:
    """Translates the lease that was granted."""
    message = pb.Lease(
        mode=LEASE_MODES[value.mode],
        ttl=value.ttl,
        reductions=[REDUCTIONS[reduction] for reduction in value.reductions],
    )
    if expire_time is not None:
        message.expire_time.FromNanoseconds(int(expire_time * 1e9))
    return message


def context(view: ContextView) -> pb.Context:
    """Translates a context."""
    message = pb.Context(
        id=view.id,
        parent_id=view.parent_id,
        fork_position=view.fork_position,
        root_id=view.root_id,
        depth=view.depth,
        length=view.length,
        num_computed_tokens=view.num_computed,
        private_blocks=view.private_blocks,
        shared_blocks=view.shared_blocks,
        host_blocks=view.host_blocks,
        disk_blocks=view.disk_blocks,
        residency=RESIDENCIES[view.residency],
        pinned=view.pinned,
        has_head_logits=view.has_head_logits,
        busy=view.is_busy,
        num_children=view.num_children,
        labels=dict(view.labels),
        reclaimable_blocks=view.reclaimable_blocks,
        lease=lease(view.lease, view.expire_time),
        adapter=view.adapter,
    )
    message.create_time.FromNanoseconds(int(view.create_time * 1e9))
    return message


def pool(view: PoolView) -> pb.Pool:
    """Translates the numbers of the pool."""
    return pb.Pool(
        total_blocks=view.total,
        free_blocks=view.free,
        live_blocks=view.live,
        cached_blocks=view.cached,
        pinned_blocks=view.pinned,
        block_size=view.block_size,
        used_slots=view.used_slots,
        host_total_blocks=view.host.total,
        host_free_blocks=view.host.free,
        host_live_blocks=view.host.live,
        disk_total_blocks=view.disk.total,
        disk_free_blocks=view.disk.free,
        disk_live_blocks=view.disk.live,
        reclaimable_blocks=view.reclaimable,
        level=PRESSURE_LEVELS[view.level],
    )


def usage(value: Usage) -> pb.Usage:
    """Translates the tokens a request ran, reused and made."""
    return pb.Usage(
        computed_tokens=value.computed_tokens,
        cached_tokens=value.cached_tokens,
        generated_tokens=value.generated_tokens,
        drafted_tokens=value.drafted_tokens,
        accepted_tokens=value.accepted_tokens,
    )


def score(value: ContinuationScore) -> pb.ContinuationScore:
    """Translates the log-probabilities of one continuation."""
    return pb.ContinuationScore(
        token_ids=value.token_ids, logprobs=value.logprobs, total=value.total
    )


def usage_view(view: UsageView) -> pb.GetUsageResponse:
    """Translates the answer of GetUsage."""
    return pb.GetUsageResponse(
        bill=bill(view.bill),
        num_contexts=view.num_contexts,
        quotas=quotas(view.quotas),
        tiers=[
            pb.TierUsage(
                tier=TIERS[item.tier],
                taken_block_seconds=item.taken,
                held_block_seconds=item.held,
                unheld_block_seconds=item.unheld,
            )
            for item in view.tiers
        ],
    )


def bill(value: Bill) -> pb.Bill:
    """Translates what was used."""
    return pb.Bill(
        computed_tokens=value.computed_tokens,
        reused_tokens=value.reused_tokens,
        generated_tokens=value.generated_tokens,
        recomputed_tokens=value.recomputed_tokens,
        block_copies=value.block_copies,
        device_block_seconds=value.block_seconds[Tier.DEVICE],
        host_block_seconds=value.block_seconds[Tier.HOST],
        disk_block_seconds=value.block_seconds[Tier.DISK],
        saved_block_seconds=value.saved_block_seconds,
    )


def quotas(view: QuotaView) -> pb.Quotas:
    """Translates a tenant's quotas."""
    return pb.Quotas(
        blocks=view.blocks,
        max_blocks=view.max_blocks,
        block_seconds=view.block_seconds,
        max_block_seconds=view.max_block_seconds,
        window=view.window,
        contexts=view.contexts,
        max_contexts=view.max_contexts,
        max_depth=view.max_depth,
        max_fan_out=view.max_fan_out,
    )


def created(value: Committed) -> pb.CreateResponse:
    """Translates the answer of Create."""
    return pb.CreateResponse(
        context=context(value.context),
        usage=usage(value.usage),
        pool=pool(value.pool),
        logprobs=value.logprobs,
    )


def extended(value: Committed) -> pb.ExtendResponse:
    """Translates the answer of Extend."""
    return pb.ExtendResponse(
        context=context(value.context),
        usage=usage(value.usage),
        pool=pool(value.pool),
        logprobs=value.logprobs,
    )


def snapshot(view: SnapshotView) -> pb.Snapshot:
    """Translates a snapshot."""
    message = pb.Snapshot(
        name=view.name,
        model_name=view.model_name,
        num_contexts=view.num_contexts,
        num_tokens=view.num_tokens,
        num_kv_tokens=view.num_kv_tokens,
        num_bytes=view.num_bytes,
    )
    message.create_time.FromNanoseconds(int(view.create_time * 1e9))
    return message


def restored(value: Restored) -> pb.RestoreResponse:
    """Translates the answer of Restore."""
    return pb.RestoreResponse(
        contexts=[context(view) for view in value.contexts],
        saved_ids=value.saved_ids,
        num_kv_tokens=value.num_kv_tokens,
        kv_refusal=value.kv_refusal,
        pool=pool(value.pool),
    )


def watched(updates: Sequence[WatchUpdate]) -> pb.WatchResponse:
    """Translates what a watcher is told at once."""
    return pb.WatchResponse(events=[_watch_event(update) for update in updates])


def _watch_event(update: WatchUpdate) -> pb.WatchEvent:
    match update:
        case Snapshot():
            snapshot = pb.WatchSnapshot(
                contexts=[context(view) for view in update.contexts],
                pool=pool(update.pool),
                is_first=update.is_first,
                is_last=update.is_last,
            )
            return pb.WatchEvent(sequence=update.sequence, snapshot=snapshot)
        case PoolChange():
            return pb.WatchEvent(sequence=update.sequence, pressure=pool(update.pool))
        case Change():
            change = pb.ContextChange(
                kind=CHANGE_KINDS[update.kind],
                context_id=update.context_id,
                parent_id=update.parent_id,
                root_id=update.root_id,
                fork_position=update.fork_position,
                length=update.length,
                lease=lease(update.lease, update.expire_time),
            )
            return pb.WatchEvent(sequence=update.sequence, change=change)


def finish(value: Finish) -> pb.Finish:
    """Translates the end of one branch."""
    return pb.Finish(
        branch=value.branch,
        reason=FINISH_REASONS[value.reason],
        context=None if value.context is None else context(value.context),
        usage=usage(value.usage),
        seed=value.seed,
        stop=value.stop,
        num_tokens_before_stop=value.num_tokens_before_stop,
        num_characters_before_stop=value.num_characters_before_stop,
        error=None if value.error is None else branch_error(value.error),
        pool=None if value.pool is None else pool(value.pool),
        tool_calls=[
            pb.ToolCall(name=call.name, arguments=call.arguments) for call in value.tool_calls
        ],
    )


def branch_error(error: AgentKVError) -> pb.BranchError:
    """Translates what ended one branch while others go on."""
    return pb.BranchError(
        reason=error.reason or "",
        message=error.message,
        metadata=error.metadata,
        retry_after=error.retry_after if isinstance(error, PoolExhausted) else None,
    )


def add_top_logprobs(message: pb.Chunk, value: Chunk) -> None:
    """Adds the most likely tokens in the place of each token, where they were asked for."""
    for top in value.top_logprobs:
        message.top_logprobs.add(token_ids=top.token_ids, logprobs=top.logprobs)


def generated(updates: Sequence[Update]) -> pb.GenerateResponse:
    """Translates one step of Generate: what it committed, and the end if it came."""
    message = pb.GenerateResponse()
    for update in updates:
        match update:
            case Chunk():
                # Appends: the text a stop held back may follow as a chunk of its own.
                message.chunk.token_ids.extend(update.token_ids)
                message.chunk.logprobs.extend(update.logprobs)
                message.chunk.text += update.text
                add_top_logprobs(message.chunk, update)
            case Finish():
                message.finish.CopyFrom(finish(update))
            case Branches():
                pass  # the one context, which the caller named
    return message


def branches_generated(updates: Sequence[Update]) -> pb.GenerateBranchesResponse:
    """Translates one step of GenerateBranches."""
    message = pb.GenerateBranchesResponse()
    for update in updates:
        match update:
            case Chunk():
                # Field by field in place: a third of what a message made and copied costs, and
                # this runs for every branch in every step.
                chunk = message.chunks.add()
                chunk.branch = update.branch
                chunk.token_ids.extend(update.token_ids)
                chunk.text = update.text
                if update.logprobs:
                    chunk.logprobs.extend(update.logprobs)
                    add_top_logprobs(chunk, update)
            case Finish():
                message.finishes.append(finish(update))
            case Branches():
                message.contexts.extend(context(view) for view in update.contexts)
    return message


def model(facts: ModelFacts) -> pb.Model:
    """Translates the facts of the model."""
    return pb.Model(
        name=facts.name,
        architecture=facts.architecture,
        vocab_size=facts.vocab_size,
        max_length=facts.max_length,
        num_layers=facts.num_layers,
        dtype=facts.dtype,
        bytes_per_block=facts.bytes_per_block,
        has_chat_template=facts.has_chat_template,
        adapters=facts.adapters,
        host_bytes_per_block=facts.host_bytes_per_block,
    )


def limits(
    engine: LimitsConfig,
    leases: LeaseConfig,
    server: ServerConfig,
    facts: ModelFacts,
    num_blocks: int,
) -> pb.Limits:
    """Translates what one tenant or one call may ask for."""
    return pb.Limits(
        max_contexts=engine.max_contexts,
        max_fork_count=engine.max_fork_count,
        max_depth=engine.max_depth,
        max_continuations=engine.max_continuations,
        max_release_count=checks.MAX_RELEASE_COUNT,
        max_page_size=checks.MAX_PAGE_SIZE,
        max_labels=checks.MAX_LABELS,
        max_request_bytes=server.max_message_bytes,
        max_deadline=server.max_deadline,
        stall_timeout=server.stall_timeout,
        max_characters=checks.max_characters(facts),
        default_lease_ttl=leases.default_ttl,
        max_lease_ttl=leases.max_ttl,
        max_pinned_blocks=leases.max_pinned(num_blocks),
        handle_retention=leases.handle_retention,
    )


def counters(view: EngineView) -> pb.Counters:
    """Translates the counts of the engine."""
    return pb.Counters(
        num_contexts=view.num_contexts,
        num_running=view.num_running,
        num_waiting=view.num_waiting,
        computed_tokens=view.computed_tokens,
        num_forks=view.num_forks,
        num_block_copies=view.num_block_copies,
        num_preemptions=view.num_preemptions,
        num_moved_out=view.num_moved_out,
        num_brought_back=view.num_brought_back,
        num_lost=view.num_lost,
        disk=None if view.disk is None else disk_counters(view.disk),
    )


def disk_counters(counts: DiskStatistics) -> pb.DiskCounters:
    """Translates the counts of the disk tier."""
    return pb.DiskCounters(
        num_written=counts.num_written,
        num_read=counts.num_read,
        num_refused=counts.num_refused,
        num_failed_writes=counts.num_failed_writes,
        num_bad_reads=counts.num_bad_reads,
        num_timeouts=counts.num_timeouts,
        last_failure=counts.last_failure,
    )
