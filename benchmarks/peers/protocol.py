"""What driver and engines say to each other: one JSON object a line, over an adapter's pipes.

It owns the values (a job as a tree of nodes in waves, and what came of it) and the adapter's loop.
It knows no engine, and needs the standard library alone: it is imported in every environment.

The driver sends `{"load": {...}}` once and then any number of `{"run": {...}}`; each is answered
by one line. Whatever a library prints goes to standard error.
"""

import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol, TextIO


@dataclass(frozen=True, slots=True)
class Node:
    """Tokens given, then tokens decoded, on top of the beginning of another node's path."""

    parent: int | None
    """Number of a node of an earlier wave; None begins a path."""
    at: int | None
    """Tokens of the parent's path that are kept; None keeps all."""
    given: tuple[int, ...]
    """Token ids to append; not empty where `parent` is None."""
    decode: int
    """Tokens to decode after those, past any end of sequence; 0 only computes."""


@dataclass(frozen=True, slots=True)
class Job:
    """Nodes in waves: those of one wave run at once, and a wave begins when the last has ended."""

    name: str
    waves: tuple[tuple[Node, ...], ...]
    """Nodes are numbered in this order, from 0."""
    num_prepared: int = 0
    """Leading waves that are run but not measured: what is cached before."""

    @property
    def nodes(self) -> tuple[Node, ...]:
        """All nodes, by number."""
        return tuple(node for wave in self.waves for node in wave)

    def numbered(self) -> Iterator[tuple[bool, range]]:
        """Yields for each wave whether it is measured, and the numbers of its nodes."""
        start = 0
        for index, wave in enumerate(self.waves):
            yield index >= self.num_prepared, range(start, start + len(wave))
            start += len(wave)

    def last_uses(self) -> list[int]:
        """Tells for each node the last wave that runs it or forks it."""
        uses: list[int] = []
        for index, wave in enumerate(self.waves):
            for node in wave:
                uses.append(index)
                if node.parent is not None:
                    uses[node.parent] = index
        return uses

    @property
    def num_decoded(self) -> int:
        """Tokens that the measured waves decode."""
        return sum(node.decode for wave in self.waves[self.num_prepared :] for node in wave)

    @property
    def num_tokens(self) -> int:
        """Tokens given and decoded, in all waves."""
        return sum(len(node.given) + node.decode for node in self.nodes)

    @property
    def least_rows(self) -> int:
        """Rows of the model that the measured waves need if nothing is ever computed again.

        A sampled token is computed only if something follows it.
        """
        followed = {node.parent for node in self.nodes if node.at is None}
        rows = 0
        for is_measured, numbers in self.numbered():
            for number in numbers:
                node = self.nodes[number]
                ends = node.decode > 0 and number not in followed
                rows += (len(node.given) + node.decode - ends) * is_measured
        return rows

    @classmethod
    def from_json(cls, fields: Any) -> "Job":
        """Reads what `asdict` and JSON made of a job."""
        waves = tuple(
            tuple(Node(n["parent"], n["at"], tuple(n["given"]), n["decode"]) for n in wave)
            for wave in fields["waves"]
        )
        return cls(fields["name"], waves, fields["num_prepared"])


@dataclass(frozen=True, slots=True)
class Load:
    """Which weights to load, and with what means."""

    gguf: str
    """Path of the quantised weights."""
    folder: str
    """Path of a folder of safetensors with the same weights, for engines that read no GGUF."""
    num_threads: int
    max_length: int
    """Most tokens of one path."""
    kv_bytes: int
    """Of the pool, for engines that let it be chosen."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """What an engine is, once it has loaded."""

    version: str
    settings: str
    """In words: what was chosen, above all of what lets branches share."""
    weight_bytes: int | None = None
    pool_bytes: int | None = None
    """Of KV; both are told by engines that know."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """One job, run once."""

    wave_seconds: tuple[float, ...]
    """Of each measured wave."""
    first_token_seconds: tuple[float, ...]
    """For each measured node that decodes, from its wave's beginning to its first token."""
    num_generated: tuple[int, ...]
    """Tokens decoded by each node, by number."""
    computed_rows: int | None
    """Rows of the model run by the measured waves; None if the engine does not tell."""
    peak_rss: int
    """Most bytes resident while the job ran."""

    @property
    def seconds(self) -> float:
        """Of all measured waves."""
        return sum(self.wave_seconds)

    @classmethod
    def from_json(cls, fields: Any) -> "Outcome":
        """Reads what `asdict` and JSON made of an outcome."""
        values: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in fields.items()
        }
        return cls(**values)


class Engine(Protocol):
    """What an adapter makes of an engine."""

    def loaded(self) -> Loaded:
        """Describes the engine."""

    def run(self, job: Job) -> Outcome:
        """Runs a job; keeps nothing of it that a later job could profit from."""


def serve(load: Callable[[Load], Engine]) -> None:
    """Answers the driver until it closes the pipe: the main function of every adapter."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries print; the pipe is for answers
    engine: Engine | None = None
    for line in sys.stdin:
        request = json.loads(line)
        try:
            if engine is None:
                engine = load(Load(**request["load"]))
                _reply(replies, asdict(engine.loaded()))
            else:
                _reply(replies, asdict(engine.run(Job.from_json(request["run"]))))
        except Exception as error:  # whatever an engine raises is the driver's to report
            traceback.print_exc()
            _reply(replies, {"error": f"{type(error).__name__}: {error}"})


def reset_peak_rss(pid: int | str = "self") -> None:
    """Lets the peak begin again from what is resident now."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")


def peak_rss(pid: int | str = "self") -> int:
    """Reads the most bytes that were resident since the peak was reset."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) << 10
    raise OSError(f"process {pid} reports no peak of its memory")


def _reply(replies: TextIO, answer: Any) -> None:
    print(json.dumps(answer), file=replies, flush=True)
