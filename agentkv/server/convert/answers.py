"""What stands in many answers: a context, its lease, the pool, and what a request ran."""

from types import MappingProxyType
from typing import Final

from agentkv.core.lease import Lease, LeaseReduction
from agentkv.core.pressure import PressureLevel
from agentkv.core.views import ContextView, PoolView, Residency, Usage
from agentkv.engine.outputs import Committed, ContinuationScore
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
