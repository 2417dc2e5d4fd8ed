"""Requests of the wire from arguments of the SDK.

It owns which arguments go together and refuses what no message can carry; ranges that depend on
the server or the model are checked there. What a generation takes is `sampling_options`.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Final, NamedTuple

from agentkv.client import replies
from agentkv.client.sampling_options import (
    SamplingOptions,
    constraint_message,
    sampling_message,
    tool_message,
)
from agentkv.client.values import LeaseMode, LeaseOptions
from agentkv.constraint import Tool
from agentkv.errors import InvalidRequest
from agentkv.v1 import agentkv_pb2 as pb

ChatTurn = Mapping[str, str]
"""One turn of a conversation: `{"role": ..., "content": ...}`."""
Continuation = str | Sequence[int]
"""Text, or token ids."""

Lease = LeaseMode | LeaseOptions
"""A mode, for the server's default time, or a mode with its options."""
NO_LEASE: Final = LeaseOptions()

NO_LABELS: Mapping[str, str] = {}


class ChatOptions(NamedTuple):
    """How a conversation is rendered."""

    add_generation_prompt: bool = True
    """Whether the opening of the assistant's turn follows, unless the last message stays open."""
    continue_final_message: bool = False
    """Whether the last message, an assistant's, stays open."""
    tools: Sequence[Tool] = ()
    """What the template shows the model as callable."""


def create(
    text: str | None,
    messages: Sequence[ChatTurn] | None,
    token_ids: Sequence[int] | None,
    *,
    chat: ChatOptions,
    allow_special: bool,
    lease: Lease | None,
    labels: Mapping[str, str],
    request_id: str,
    logprobs: bool,
    adapter: str,
) -> pb.CreateRequest:
    """Builds a Create request from exactly one form of prompt."""
    _require_one(text=text, messages=messages, token_ids=token_ids)
    with _refusing_bad_values():
        request = pb.CreateRequest(
            messages=None if messages is None else _chat(messages, chat),
            token_ids=_ids(token_ids),
            lease=_lease(lease),
            labels=labels,
            request_id=request_id,
            allow_special=allow_special,
            logprobs=logprobs,
            adapter=adapter,
        )
        if text is not None:
            request.text = _checked_text(text)
        return request


def fork(
    context_id: str,
    count: int,
    at: int | None,
    lease: Lease | None,
    labels: Mapping[str, str],
    request_id: str,
) -> pb.ForkRequest:
    """Builds a Fork request."""
    with _refusing_bad_values():
        return pb.ForkRequest(
            context_id=context_id,
            count=count,
            at=at,
            lease=_lease(lease),
            labels=labels,
            request_id=request_id,
        )


def update_lease(context_id: str, lease: Lease, *, recursive: bool) -> pb.UpdateLeaseRequest:
    """Builds an UpdateLease request."""
    with _refusing_bad_values():
        return pb.UpdateLeaseRequest(
            context_id=context_id, lease=_lease(lease), recursive=recursive
        )


def save(
    context_id: str, name: str, *, recursive: bool, tokens_only: bool, overwrite: bool
) -> pb.SaveRequest:
    """Builds a Save request."""
    with _refusing_bad_values():
        return pb.SaveRequest(
            context_id=context_id,
            name=name,
            recursive=recursive,
            tokens_only=tokens_only,
            overwrite=overwrite,
        )


def restore(
    name: str, lease: Lease | None, request_id: str, *, tokens_only: bool
) -> pb.RestoreRequest:
    """Builds a Restore request."""
    with _refusing_bad_values():
        return pb.RestoreRequest(
            name=name, tokens_only=tokens_only, lease=_lease(lease), request_id=request_id
        )


def delete_snapshot(name: str) -> pb.DeleteSnapshotRequest:
    """Builds a DeleteSnapshot request."""
    with _refusing_bad_values():
        return pb.DeleteSnapshotRequest(name=name, allow_missing=True)


def extend(
    context_id: str,
    text: str | None,
    messages: Sequence[ChatTurn] | None,
    token_ids: Sequence[int] | None,
    *,
    chat: ChatOptions,
    expected_length: int,
    logprobs: bool,
    allow_special: bool,
) -> pb.ExtendRequest:
    """Builds an Extend request from exactly one form of input."""
    _require_one(text=text, messages=messages, token_ids=token_ids)
    with _refusing_bad_values():
        request = pb.ExtendRequest(
            context_id=context_id,
            messages=None if messages is None else _chat(messages, chat),
            token_ids=_ids(token_ids),
            expected_length=expected_length,
            logprobs=logprobs,
            allow_special=allow_special,
        )
        if text is not None:
            request.text = _checked_text(text)
        return request


def generate(context_id: str, options: SamplingOptions) -> pb.GenerateRequest:
    """Builds a Generate request; the expected length is set when it is sent."""
    with _refusing_bad_values():
        return pb.GenerateRequest(
            context_id=context_id,
            sampling=sampling_message(options),
            constraint=constraint_message(options.get("constraint")),
        )


def generate_branches(
    context_id: str,
    count: int,
    at: int | None,
    labels: Mapping[str, str],
    options: SamplingOptions,
) -> pb.GenerateBranchesRequest:
    """Builds a GenerateBranches request."""
    with _refusing_bad_values():
        return pb.GenerateBranchesRequest(
            context_id=context_id,
            count=count,
            at=at,
            sampling=sampling_message(options),
            labels=labels,
            constraint=constraint_message(options.get("constraint")),
        )


def score(
    context_id: str, continuations: Sequence[Continuation], *, allow_special: bool
) -> pb.ScoreRequest:
    """Builds a Score request; a bare text in place of a list of them is refused."""
    if isinstance(continuations, str):
        raise InvalidRequest("continuations must be a list of texts or token lists, not one text.")
    with _refusing_bad_values():
        return pb.ScoreRequest(
            context_id=context_id,
            continuations=[_continuation(item) for item in continuations],
            allow_special=allow_special,
        )


def truncate(context_id: str, length: int, *, expected_length: int) -> pb.TruncateRequest:
    """Builds a Truncate request."""
    with _refusing_bad_values():
        return pb.TruncateRequest(
            context_id=context_id, length=length, expected_length=expected_length
        )


def get(context_id: str, tokens_from: int | None = None) -> pb.GetRequest:
    """Builds a Get request, for the tokens from a position on if one is given."""
    with _refusing_bad_values():
        return pb.GetRequest(context_id=context_id, tokens_from=tokens_from)


def list_page(root_id: str | None, page_size: int | None, page_token: str) -> pb.ListRequest:
    """Builds a List request for one page."""
    with _refusing_bad_values():
        return pb.ListRequest(root_id=root_id, page_size=page_size, page_token=page_token)


def get_usage(context_id: str | None, root_id: str | None) -> pb.GetUsageRequest:
    """Builds a GetUsage request for one context, one tree, or neither: the whole tenant."""
    with _refusing_bad_values():
        if context_id is not None:
            return pb.GetUsageRequest(context_id=context_id)
        if root_id is not None:
            return pb.GetUsageRequest(root_id=root_id)
        return pb.GetUsageRequest()


def _chat(messages: Sequence[ChatTurn], options: ChatOptions) -> pb.ChatMessages:
    for number, turn in enumerate(messages):
        if set(turn) != {"role", "content"}:
            raise InvalidRequest(
                f"messages[{number}] must have exactly role and content, has {sorted(turn)}.",
                violations={f"messages[{number}]": "must have exactly role and content"},
            )
    return pb.ChatMessages(
        messages=[pb.ChatMessage(role=turn["role"], content=turn["content"]) for turn in messages],
        add_generation_prompt=(
            options.add_generation_prompt and not options.continue_final_message
        ),
        continue_final_message=options.continue_final_message,
        tools=[tool_message(tool) for tool in options.tools],
    )


def _continuation(item: Continuation) -> pb.Continuation:
    if isinstance(item, str):
        return pb.Continuation(text=item)
    return pb.Continuation(token_ids=_ids(item))


def _checked_text(text: str) -> str:
    if not isinstance(text, str):
        raise TypeError(f"text must be a str, not {type(text).__name__}; for ids use token_ids=.")
    return text


def _lease(lease: Lease | None) -> pb.LeaseOptions | None:
    if lease is None:
        return None
    options = LeaseOptions(lease) if isinstance(lease, LeaseMode) else lease
    if options.mode is LeaseMode.UNKNOWN:
        raise InvalidRequest(
            "No lease can be asked for that this client does not know.",
            violations={"lease.mode": "is not known to this client"},
        )
    modes = {mode: value for value, mode in replies.LEASE_MODES.items()}
    return pb.LeaseOptions(
        mode=pb.LEASE_MODE_UNSPECIFIED if options.mode is None else modes[options.mode],
        ttl=options.ttl,
        may_reduce=options.may_reduce,
    )


def _ids(token_ids: Sequence[int] | None) -> pb.TokenIds | None:
    return None if token_ids is None else pb.TokenIds(ids=token_ids)


def _require_one(**forms: object) -> None:
    given = [name for name, value in forms.items() if value is not None]
    if len(given) != 1:
        raise InvalidRequest(
            f"Give exactly one of {', '.join(forms)}; got {', '.join(given) or 'none'}."
        )


@contextmanager
def _refusing_bad_values() -> Iterator[None]:
    """Turns what a message cannot carry (a negative count, half a surrogate) into our error."""
    try:
        yield
    except ValueError as error:  # covers UnicodeError
        raise InvalidRequest(f"A value cannot be sent: {error}.") from error
