"""Steps of a generation as messages of its stream, and how its branches end."""

from collections.abc import Sequence
from types import MappingProxyType
from typing import Final

from agentkv.core.request import FinishReason
from agentkv.engine.outputs import Branches, Chunk, Finish, Update
from agentkv.errors import AgentKVError, PoolExhausted
from agentkv.server.convert import answers
from agentkv.v1 import agentkv_pb2 as pb

FINISH_REASONS: Final = MappingProxyType(
    {
        FinishReason.STOP: pb.FINISH_REASON_STOP,
        FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
        FinishReason.ERROR: pb.FINISH_REASON_ERROR,
        FinishReason.DEAD_END: pb.FINISH_REASON_DEAD_END,
        FinishReason.TOOL_CALL: pb.FINISH_REASON_TOOL_CALL,
    }
)


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
                message.contexts.extend(answers.context(view) for view in update.contexts)
    return message


def finish(value: Finish) -> pb.Finish:
    """Translates the end of one branch."""
    return pb.Finish(
        branch=value.branch,
        reason=FINISH_REASONS[value.reason],
        context=None if value.context is None else answers.context(value.context),
        usage=answers.usage(value.usage),
        seed=value.seed,
        stop=value.stop,
        num_tokens_before_stop=value.num_tokens_before_stop,
        num_characters_before_stop=value.num_characters_before_stop,
        error=None if value.error is None else branch_error(value.error),
        pool=None if value.pool is None else answers.pool(value.pool),
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
