"""Puts the pieces of one branch together. It knows messages and values, no stream and no handle."""

from agentkv.client import replies
from agentkv.client.completion import Chunk, Completion, FinishReason, TopLogprobs
from agentkv.errors import AgentKVError
from agentkv.v1 import agentkv_pb2 as pb


class BranchRecord:
    """What one branch has generated so far."""

    def __init__(self) -> None:
        self._texts: list[str] = []
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []
        self.top_logprobs: list[TopLogprobs] = []
        self.completion: Completion | None = None
        """Everything, once the branch has ended."""

    @property
    def text(self) -> str:
        """Returns the text so far."""
        return "".join(self._texts)

    def add(self, chunk: Chunk) -> None:
        """Appends tokens of one step."""
        assert self.completion is None, "a chunk after the branch's finish"
        self._texts.append(chunk.text)
        self.token_ids.extend(chunk.token_ids)
        self.logprobs.extend(chunk.logprobs)
        self.top_logprobs.extend(chunk.top_logprobs)

    def finish(self, message: pb.Finish) -> Completion:
        """Ends the branch."""
        error: AgentKVError | None = None
        if message.HasField("error"):
            error = replies.branch_error(message.error)
        self.completion = Completion(
            text=self.text,
            token_ids=tuple(self.token_ids),
            finish_reason=replies.FINISH_REASONS.get(message.reason, FinishReason.UNKNOWN),
            usage=replies.usage(message.usage),
            seed=message.seed if message.HasField("seed") else None,
            logprobs=tuple(self.logprobs),
            top_logprobs=tuple(self.top_logprobs),
            stop=message.stop if message.HasField("stop") else None,
            num_tokens_before_stop=(
                message.num_tokens_before_stop
                if message.HasField("num_tokens_before_stop")
                else None
            ),
            num_characters_before_stop=(
                message.num_characters_before_stop
                if message.HasField("num_characters_before_stop")
                else None
            ),
            error=error,
            tool_calls=tuple(map(replies.tool_call, message.tool_calls)),
        )
        return self.completion
