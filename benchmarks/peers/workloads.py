"""What is run: each workload makes a job for a repeat, with token ids no other repeat has."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.peers.protocol import Job, Node
from benchmarks.peers.traces import Encode, crossword_job, game24_job, read_json, session_job

VOCABULARY = range(1000, 40_000)
"""Plain token ids of the model, none of them special."""


@dataclass(frozen=True, slots=True)
class Workload:
    """One kind of work."""

    name: str
    kind: str
    """What `--workload` selects by."""
    make_job: Callable[[int], Job]
    """By the number of the repeat."""
    waves: tuple[str, ...] = ()
    """Names of the measured waves, where each is a figure of its own."""


def branches(count: int, decode: int, prefix: int) -> Workload:
    """Branches of one prefix that is computed before."""

    def make_job(repeat: int) -> Job:
        root = Node(None, None, _tokens(repeat, prefix), 0)
        return Job(name, ((root,), (Node(0, None, (), decode),) * count), num_prepared=1)

    name = f"{count} x {decode} over {prefix}"
    return Workload(name, "branches", make_job)


def self_consistency(counts: tuple[int, ...], decode: int, prefix: int) -> Workload:
    """One question, sampled n times, for several n over one prefix."""

    def make_job(repeat: int) -> Job:
        root = Node(None, None, _tokens(repeat, prefix), 0)
        waves = tuple((Node(0, None, (), decode),) * count for count in counts)
        return Job(f"self-consistency over {prefix}", ((root,), *waves), num_prepared=1)

    names = tuple(f"n = {count}" for count in counts)
    return Workload(f"self-consistency over {prefix}", "self-consistency", make_job, names)


def single_stream(prompt: int, decode: int) -> Workload:
    """One stream without branches, its prompt computed before."""
    one = branches(1, decode, prompt)
    return Workload(f"1 stream, {decode} over {prompt}", "branches", one.make_job)


def replays(data: Path, encode: Encode, *, is_quick: bool) -> list[Workload]:
    """Recorded work: Game of 24, crosswords and an agent's session.

    Raises:
        SystemExit: A file is missing.
    """
    problems = read_json(data / "tree-of-thought" / "game24_tot.json")
    puzzles = read_json(data / "tree-of-thought" / "crosswords_dfs.json")
    trace = read_json(data / "claude-code" / "trace_0277.json")
    visits, requests = (10, 6) if is_quick else (20, 14)
    return [
        Workload("Game of 24", "game24", lambda i: game24_job(problems, i, encode, _salt(i))),
        Workload(
            "crossword",
            "crosswords",
            lambda i: crossword_job(puzzles[0], 0, encode, _salt(i), limit=visits),
        ),
        Workload(
            "agent session",
            "agents",
            lambda i: session_job(trace, VOCABULARY, _salt(i), limit=requests),
        ),
    ]


def synthetic() -> list[Workload]:
    """Branches, one stream, and self-consistency."""
    return [
        branches(16, 32, 1024),
        branches(32, 16, 4096),
        single_stream(128, 64),
        *(self_consistency((4, 16, 64), 16, prefix) for prefix in (512, 2048, 8000)),
    ]


def _tokens(repeat: int, count: int) -> tuple[int, ...]:
    source = random.Random(repeat * 100_003 + count)
    return tuple(source.choices(VOCABULARY, k=count))


def _salt(repeat: int) -> int:
    return VOCABULARY[repeat]
