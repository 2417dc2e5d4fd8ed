"""The two kinds of stream: generating on one context, and on many branches of one.

They own what each message means for the handles involved. No input or output.
"""

from collections.abc import Iterator, Mapping

from agentkv.client import messages, replies
from agentkv.client.accumulate import BranchRecord
from agentkv.client.completion import BranchFinish, Chunk, Completion
from agentkv.client.handle_state import HandleState
from agentkv.client.operation import Operation
from agentkv.client.retry import Attempts
from agentkv.client.sampling_options import SamplingOptions
from agentkv.client.stream_state import OpenStream, StreamState
from agentkv.v1 import agentkv_pb2 as pb


class GenerateState(StreamState[Chunk]):
    """Generates on one context; starts at once.

    Raises:
        InvalidRequest: Sampling options are out of range, or the timeout is.
    """

    method = "Generate"

    def __init__(
        self,
        handle: HandleState,
        open_stream: OpenStream,
        options: SamplingOptions,
        timeout: float | None,
    ) -> None:
        super().__init__(open_stream, handle.session.attempts(timeout))
        self._handle = handle
        self._request = messages.generate(handle.id, options)
        self.record = BranchRecord()
        if not handle.is_unsettled:  # else the length must be learned first, which takes a call
            self.start()

    @property
    def is_finished(self) -> bool:
        """Whether the finish was read."""
        return self.record.completion is not None

    def result(self) -> Completion:
        """Returns the completion of a stream that has run to its end."""
        self.check_complete()
        assert self.record.completion is not None
        return self.record.completion

    def prepare(self, attempts: Attempts) -> Operation[None]:
        """Learns the length, if an earlier stream was closed early."""
        yield from self._handle.settle(attempts)

    def request(self) -> pb.GenerateRequest:
        """Sets the length the context must have, which makes a repeat safe."""
        self._request.expected_length = self._handle.length
        return self._request

    def absorb(self, message: pb.GenerateResponse) -> Iterator[Chunk]:
        """Takes in one engine step."""
        if message.HasField("chunk"):
            chunk = replies.chunk(message.chunk)
            self.record.add(chunk)
            self._handle.length += len(chunk.token_ids)
            yield chunk
        if message.HasField("finish"):
            _finish(self._handle, self.record, message.finish)

    def abandon(self) -> None:
        """Marks the handle: its length is not known."""
        self._handle.is_unsettled = True


class BranchesState(StreamState[Chunk | BranchFinish]):
    """Forks a context and generates on every branch; starts at once.

    The call is never repeated: a second one would fork a second time.

    Raises:
        InvalidRequest: Sampling options are out of range, or the timeout is.
    """

    method = "GenerateBranches"

    def __init__(
        self,
        handle: HandleState,
        open_stream: OpenStream,
        count: int,
        at: int | None,
        labels: Mapping[str, str],
        options: SamplingOptions,
        timeout: float | None,
    ) -> None:
        super().__init__(open_stream, handle.session.attempts(timeout, may_repeat=False))
        self._handle = handle
        self._request = messages.generate_branches(handle.id, count, at, labels, options)
        self.branches: list[HandleState] = []
        """The branches, in order of their numbers; empty until the first event was read."""
        self.records: list[BranchRecord] = []
        self.start()

    @property
    def is_finished(self) -> bool:
        """Whether the finish of every branch was read."""
        return bool(self.records) and all(record.completion for record in self.records)

    def results(self) -> list[Completion]:
        """Returns the completion of each branch of a stream that has run to its end."""
        self.check_complete()
        return [record.completion for record in self.records if record.completion is not None]

    def request(self) -> pb.GenerateBranchesRequest:
        """Returns the request."""
        return self._request

    def absorb(self, message: pb.GenerateBranchesResponse) -> Iterator[Chunk | BranchFinish]:
        """Takes in one engine step."""
        if message.contexts:
            self.branches = [self._handle.child(context) for context in message.contexts]
            self.records = [BranchRecord() for _ in self.branches]
        for item in message.chunks:
            chunk = replies.chunk(item)
            self.records[chunk.branch].add(chunk)
            self.branches[chunk.branch].length += len(chunk.token_ids)
            yield chunk
        for finish in message.finishes:
            record = self.records[finish.branch]
            completion = _finish(self.branches[finish.branch], record, finish)
            yield BranchFinish(finish.branch, completion)

    def abandon(self) -> None:
        """Marks the branches that were still generating: their lengths are not known."""
        for branch, record in zip(self.branches, self.records, strict=True):
            branch.is_unsettled = record.completion is None


def _finish(handle: HandleState, record: BranchRecord, message: pb.Finish) -> Completion:
    completion = record.finish(message)
    handle.session.see(message)
    handle.count(completion.usage)
    if message.HasField("context"):
        handle.see(replies.context(message.context))
    else:
        handle.lineage.release()
    return completion
