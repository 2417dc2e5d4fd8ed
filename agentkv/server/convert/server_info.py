"""What a server says about itself: its model, its limits and its counters, as messages."""

from agentkv.config import LeaseConfig, LimitsConfig, ServerConfig
from agentkv.core.disk_statistics import DiskStatistics
from agentkv.engine.outputs import EngineView, ModelFacts
from agentkv.server import checks
from agentkv.server.input_checks import max_characters
from agentkv.v1 import agentkv_pb2 as pb


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
        max_characters=max_characters(facts),
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
