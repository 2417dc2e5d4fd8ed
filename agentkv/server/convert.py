"""The engine's values as messages. It copies numbers; what they mean stands in the contract.

The way in, from messages to values, is `agentkv.server.checks`.
"""

from collections.abc import Sequence
from types import MappingProxyType
from typing import Final

from agentkv.config import LimitsConfig, ServerConfig
from agentkv.core.request import FinishReason
from agentkv.core.views import ContextView, PoolView, Residency, Usage
from agentkv.engine.outputs import (
    Branches,
    Chunk,
    Committed,
    ContinuationScore,
    EngineView,
    Finish,
    ModelFacts,
    Update,
)
from agentkv.errors import AgentKVError
from agentkv.server import checks
from agentkv.v1 import agentkv_pb2 as pb

RESIDENCIES: Final = MappingProxyType(
    {
        Residency.DEVICE: pb.RESIDENCY_DEVICE,
        Residency.PARTIAL: pb.RESIDENCY_PARTIAL,
        Residency.NONE: pb.RESIDENCY_NONE,
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
        residency=RESIDENCIES[view.residency],
        pinned=view.pinned,
        has_head_logits=view.has_head_logits,
        busy=view.is_busy,
        num_children=view.num_children,
        labels=dict(view.labels),
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
    )


def usage(value: Usage) -> pb.Usage:
    """Translates the tokens a request ran, reused and made."""
    return pb.Usage(
        computed_tokens=value.computed_tokens,
        cached_tokens=value.cached_tokens,
        generated_tokens=value.generated_tokens,
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
        error=None if value.error is None else branch_error(value.error),
        pool=None if value.pool is None else pool(value.pool),
        tool_calls=[
            pb.ToolCall(name=call.name, arguments=call.arguments) for call in value.tool_calls
        ],
    )


def branch_error(error: AgentKVError) -> pb.BranchError:
    """Translates what ended one branch while others go on."""
    return pb.BranchError(reason=error.reason or "", message=error.message, metadata=error.metadata)


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
    )


def limits(engine: LimitsConfig, server: ServerConfig, facts: ModelFacts) -> pb.Limits:
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
    )
