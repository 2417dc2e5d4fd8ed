"""Real traces as traffic: what each session asks for, token by token count, and when.

Owns the formats of the files and how their lengths are scaled. It knows no engine and no policy.
The files are public and not part of this repository:

    claude-code/trace_*.json        callanjfox/kv-cache-tester, commit 94f6046, Apache-2.0
    azure/llm_2023_conv.csv         Azure/AzurePublicDataset, commit b469a11, CC-BY 4.0 (Splitwise)
    mooncake/conversation_trace.jsonl   kvcache-ai/Mooncake, commit 3b5a594, Apache-2.0
"""

import csv
import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

CLAUDE_BLOCK = 64
"""Tokens per listed id in the agents' traces, before scaling."""
MOONCAKE_BLOCK = 512


class Piece(NamedTuple):
    """Tokens of a prompt: the same ones wherever the key is the same, or new ones without a key."""

    key: str | None
    length: int


class Turn(NamedTuple):
    """One call of a session: cut the context, append, generate."""

    pause: float
    """Seconds since the answer before it: a tool runs, or a person thinks."""
    keep: int
    """Tokens of the context that stay; what lies beyond is cut off."""
    pieces: tuple[Piece, ...]
    """What is appended; at least one token."""
    num_out: int
    """Tokens to generate, on each branch."""
    branches: int = 1
    """Branches that generate; the first lives on."""
    helpers: tuple["Script", ...] = ()
    """Sub-agents that start with the pause; the call waits for them."""

    @property
    def num_new(self) -> int:
        """Tokens appended."""
        return sum(piece.length for piece in self.pieces)

    @property
    def length(self) -> int:
        """Tokens of the context once it has generated."""
        return self.keep + self.num_new + self.num_out


class Script(NamedTuple):
    """What one session does."""

    turns: tuple[Turn, ...]

    @property
    def longest(self) -> int:
        """Most tokens its context ever has."""
        return max(turn.length for turn in self.turns)


class Arrival(NamedTuple):
    """A session that begins at a time, in seconds."""

    at: float
    script: Script


@dataclass(frozen=True, slots=True)
class Length:
    """How lengths of a trace become lengths for a model."""

    divisor: int = 1
    longest: int = 8192
    """Sessions that would exceed it end before that; requests are left out."""

    def __call__(self, num_tokens: int) -> int:
        """Scales, to at least one token."""
        return max(1, round(num_tokens / self.divisor))


def claude_sessions(data: Path, length: Length) -> tuple[Script, ...]:
    """Reads the sessions of coding agents, sub-agents included, in the order of the files.

    Ids mean something inside one file only, so sessions share no more than their tools' prompt
    (`tool_tokens`), where its length and the model are the same: an assumption.

    Raises:
        SystemExit: There is no such file.
    """
    folder = data / "claude-code"
    paths = sorted(folder.glob("trace_*.json"))
    if not paths:
        raise missing(folder / "trace_*.json")
    scripts = []
    for path in paths:
        trace = json.loads(path.read_text(encoding="utf-8"))
        model = trace["requests"][0]["model"]
        tools = Piece(f"tools {model} {trace['tool_tokens']}", length(trace["tool_tokens"]))
        scripts.append(_session(trace["requests"], tools, length))
    return tuple(scripts)


def azure_requests(data: Path, length: Length, *, branches: int = 1) -> tuple[Arrival, ...]:
    """Reads requests to a chat service, with times since the first; nothing is shared among them.

    Raises:
        SystemExit: There is no such file.
    """
    path = data / "azure" / "llm_2023_conv.csv"
    if not path.is_file():
        raise missing(path)
    arrivals: list[Arrival] = []
    with path.open(encoding="utf-8", newline="") as file:
        first = None
        for row in csv.DictReader(file):
            time = datetime.fromisoformat(row["TIMESTAMP"][:26])
            first = first or time
            num_in, num_out = length(int(row["ContextTokens"])), length(int(row["GeneratedTokens"]))
            if num_in + num_out <= length.longest:
                turn = Turn(0.0, 0, (Piece(None, num_in),), num_out, branches)
                arrivals.append(Arrival((time - first).total_seconds(), Script((turn,))))
    return tuple(arrivals)


def mooncake_requests(data: Path, length: Length) -> tuple[Arrival, ...]:
    """Reads requests to a chat service with the prefixes that they share.

    Its clock has steps of some seconds; the requests of a step are spread evenly over it.

    Raises:
        SystemExit: There is no such file.
    """
    path = data / "mooncake" / "conversation_trace.jsonl"
    if not path.is_file():
        raise missing(path)
    arrivals = []
    with path.open(encoding="utf-8") as file:
        for line in file:
            request = json.loads(line)
            num_in, num_out = length(request["input_length"]), length(request["output_length"])
            if num_in + num_out > length.longest:
                continue
            pieces, left = [], num_in
            for key in request["hash_ids"]:
                size = min(left, length(MOONCAKE_BLOCK))
                if size:
                    pieces.append(Piece(f"mooncake {key}", size))
                left -= size
            turn = Turn(0.0, 0, tuple(pieces), num_out)
            arrivals.append(Arrival(request["timestamp"] / 1000, Script((turn,))))
    return tuple(_spread(arrivals))


def missing(path: Path) -> SystemExit:
    """Says which file is expected, in one line."""
    return SystemExit(
        f"{path} is missing: --data names the folder that holds claude-code/, azure/ and mooncake/."
    )


def _spread(arrivals: Sequence[Arrival]) -> Iterator[Arrival]:
    """Moves arrivals of equal times apart, up to the next time."""
    steps = [list(step) for _, step in itertools.groupby(arrivals, lambda arrival: arrival.at)]
    for step, after in zip(steps, [*steps[1:], steps[-1]], strict=True):
        gap = (after[0].at - step[0].at) / len(step)
        for number, arrival in enumerate(step):
            yield Arrival(arrival.at + number * gap, arrival.script)


def _session(requests: Sequence[dict[str, Any]], prefix: Piece, length: Length) -> Script:
    """Makes the script of one agent; its sub-agents start in the pause before some turn."""
    calls = [request for request in requests if request["type"] != "subagent"]
    helpers: dict[int, list[Script]] = {}
    for entry in requests:
        if entry["type"] == "subagent":
            start = entry["t"] - entry["duration_ms"] / 1000
            after = [number for number, call in enumerate(calls) if number and call["t"] > start]
            script = _helper(entry, requests, length)
            helpers.setdefault(after[0] if after else len(calls) - 1, []).append(script)
    turns: list[Turn] = []
    before: dict[str, Any] | None = None
    for number, call in enumerate(calls):
        num_in, num_out = length(call["in"]), length(call["out"])
        if num_in + num_out > length.longest:
            break
        keep = 0 if before is None else _kept(before, call, num_in, turns[-1].length, length)
        num_new, pieces = num_in - keep, []
        if before is None:
            shared = min(prefix.length, num_new)
            pieces.append(Piece(prefix.key, shared))
            num_new -= shared
        if num_new:
            pieces.append(Piece(None, num_new))
        pause = float(call.get("think_time", 0.0))
        turns.append(
            Turn(pause, keep, tuple(pieces), num_out, helpers=tuple(helpers.get(number, ())))
        )
        before = call
    return Script(tuple(turns))


def _kept(
    before: dict[str, Any], call: dict[str, Any], num_in: int, num_there: int, length: Length
) -> int:
    """Finds how many tokens of the context so far the next input begins with.

    Input that continues all listed blocks of the one before holds the answer to it as well.
    """
    common = _common(before["hash_ids"], call["hash_ids"])
    if common == len(before["hash_ids"]):
        return min(num_there, num_in - 1)
    return min(length(common * CLAUDE_BLOCK), num_in - 1)


def _helper(entry: dict[str, Any], requests: Sequence[dict[str, Any]], length: Length) -> Script:
    """Makes the script of a sub-agent, which starts like the others of its parent and model."""
    first = entry["requests"][0]
    others = [
        _common(first["hash_ids"], other["requests"][0]["hash_ids"])
        for other in requests
        if other["type"] == "subagent"
        and other is not entry
        and other["requests"][0]["model"] == first["model"]
    ]
    shared = max(others, default=0) * CLAUDE_BLOCK
    prefix = Piece(f"helper {first['model']}", length(shared) if shared else 0)
    return _session(entry["requests"], prefix, length)


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    count = 0
    for mine, its in zip(one, other, strict=False):
        if mine != its:
            break
        count += 1
    return count
