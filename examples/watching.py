"""A transport that watches one client's calls, so that the examples need no bookkeeping.

It owns what each call and answer means for `Accounts`. A client works the same without it:
`Client(address)` is all that a program of your own needs.
"""

from collections.abc import Hashable, Sequence
from typing import Any

from accounts import Accounts
from google.protobuf.message import Message

from agentkv.client import replies
from agentkv.client.grpc_transport import GrpcTransport
from agentkv.client.operation import Call
from agentkv.client.transport import MessageStream
from agentkv.v1 import agentkv_pb2 as pb


class WatchingTransport:
    """Passes everything on, and tells what passes.

    Args:
        address: Where the server is, `host:port`.
        accounts: Whom to tell. They know contexts that this transport saw being made.
    """

    def __init__(self, address: str, accounts: Accounts) -> None:
        self._wire = GrpcTransport(address)
        self._accounts = accounts

    def unary(self, call: Call) -> Any:
        """Sends a call, waits for its answer and tells of it."""
        reply = self._wire.unary(call)
        self._tell(call.method, call.request, reply)
        return reply

    def stream(self, call: Call) -> MessageStream:
        """Sends a call; tells of its answers as they are read."""
        return WatchedStream(self._wire.stream(call), call.request, self._accounts)

    def close(self) -> None:
        """Closes the connection."""
        self._wire.close()

    def _tell(self, method: str, request: Any, reply: Any) -> None:
        accounts = self._accounts
        match method:
            case "Create":
                accounts.see(replies.context(reply.context))
                accounts.append(reply.context.id, _tokens(request, "prompt", reply.context.length))
                accounts.count_found(reply.usage.cached_tokens)
            case "Fork":
                for context in reply.contexts:
                    accounts.see(replies.context(context))
            case "Extend":
                count = reply.context.length - accounts.length(reply.context.id)
                accounts.append(reply.context.id, _tokens(request, "input", count))
                accounts.see(replies.context(reply.context))
            case "Truncate":
                accounts.see(replies.context(reply.context))
            case "Score":
                continuations = [score.token_ids for score in reply.scores]
                accounts.count_scores(request.context_id, continuations)
            case "Release":
                accounts.release(request.context_ids, recursive=request.recursive)
        if "pool" in reply.DESCRIPTOR.fields_by_name:
            accounts.measure(replies.pool(reply.pool))


class WatchedStream:
    """The answers of Generate or GenerateBranches, told as they are read."""

    def __init__(self, stream: MessageStream, request: Any, accounts: Accounts) -> None:
        self._stream = stream
        self._accounts = accounts
        self._ids = [request.context_id]
        """Contexts by number of the branch: the one generated on, until branches are named."""

    def read(self) -> Message | None:
        """Waits for the next message, and tells of it; None at the end."""
        message = self._stream.read()
        if message is not None:
            self._tell(message)
        return message

    def cancel(self) -> None:
        """Ends the call."""
        self._stream.cancel()

    def _tell(self, message: Any) -> None:
        if isinstance(message, pb.GenerateResponse):
            chunks = [message.chunk] if message.HasField("chunk") else []
            finishes = [message.finish] if message.HasField("finish") else []
        else:
            chunks, finishes = message.chunks, message.finishes
            if message.contexts:
                self._ids = [context.id for context in message.contexts]
                for context in message.contexts:
                    self._accounts.see(replies.context(context))
        for chunk in chunks:
            self._accounts.append(self._ids[chunk.branch], chunk.token_ids)
        for finish in finishes:
            self._finish(finish)

    def _finish(self, finish: pb.Finish) -> None:
        id = self._ids[finish.branch]
        self._accounts.count_generation(id, finish.usage.generated_tokens)
        if finish.HasField("context"):
            self._accounts.see(replies.context(finish.context))
        if finish.HasField("pool"):
            self._accounts.measure(replies.pool(finish.pool))


def _tokens(request: Any, form: str, count: int) -> Sequence[Hashable]:
    """Lists the tokens that a request gave: by id, or as so many parts of the same text."""
    name = request.WhichOneof(form)
    given = getattr(request, name)
    if name == "token_ids":
        return list(given.ids)
    key = given if name == "text" else given.SerializeToString()
    return [(key, position) for position in range(count)]
