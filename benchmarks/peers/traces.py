"""Recorded runs as jobs: trees of thought and agent sessions.

It owns the formats and how they are scaled. Nodes decode as many tokens as the recorded text has;
what they decode is the engine's own, sampled. So every engine does equal work, step by step, and
whoever resends a path finds it in its prefix cache, as it would in use.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.peers.protocol import Job, Node

Encode = Callable[[str], list[int]]
"""Text to token ids, none special."""

GAME24_TASK = "Use the four numbers and + - * / to get 24. Each step takes two numbers.\n"
CROSSWORD_TASK = "Fill a 5 x 5 crossword. Each step writes one word, across (h) or down (v).\n"
NUM_EXAMPLES = 8
SCALE = 64
"""Tokens of a recorded session for each token here; also the size of its blocks."""


def read_json(path: Path) -> Any:
    """Reads a trace.

    Raises:
        SystemExit: It is not there; says which file is wanted.
    """
    if not path.is_file():
        raise SystemExit(f"There is no {path}: --data names a folder that holds {path.name}.")
    return json.loads(path.read_text(encoding="utf-8"))


def game24_job(problems: Sequence[Any], number: int, encode: Encode, salt: int) -> Job:
    """Makes the breadth-first search of one problem: a wave a step, a branch a candidate.

    Candidates of one state and one length stand side by side: engines sample them in one request.

    Args:
        problems: `game24_tot.json`.
        number: Which of them; the texts of those after it are the examples of the prompt.
        encode: The tokenizer.
        salt: First token of the prompt, so that nothing is cached from another run.
    """
    others = [problems[(number + 1 + i) % len(problems)] for i in range(NUM_EXAMPLES)]
    texts = [f"Input: {p['steps'][0]['x']}\n{p['ys'][0]}\n" for p in others if p["ys"]]
    steps = problems[number]["steps"]
    prompt = GAME24_TASK + "".join(texts) + f"Input: {steps[0]['x']}\n"
    waves: list[tuple[Node, ...]] = [(Node(None, None, (salt, *encode(prompt)), 0),)]
    nodes = {"": 0}
    count = 1
    for step in steps:
        wave: list[Node] = []
        found: dict[str, int] = {}
        candidates = []
        for text in step["new_ys"]:
            parent = max((y for y in step["ys"] if text.startswith(y)), key=len)
            length = max(1, len(encode(text[len(parent) :])))
            candidates.append((nodes[parent], length, text))
        for parent_number, length, text in sorted(candidates):
            wave.append(Node(parent_number, None, (), length))
            found.setdefault(text, count)
            count += 1
        nodes = found
        waves.append(tuple(wave))
    return Job(f"game24 {number}", tuple(waves), num_prepared=1)


def crossword_job(
    states: Sequence[Any], number: int, encode: Encode, salt: int, *, limit: int
) -> Job:
    """Makes the first visits of a depth-first search: a wave a visit, from where it goes back to.

    Args:
        states: One puzzle of `crosswords_dfs.json`.
        number: Its number, for the name.
        encode: The tokenizer.
        salt: As of `game24_job`.
        limit: Most visits.
    """
    waves: list[tuple[Node, ...]] = [(Node(None, None, (salt, *encode(CROSSWORD_TASK)), 0),)]
    nodes: dict[tuple[str, ...], int] = {(): 0}
    for state in states:
        actions = tuple(state["actions"])
        for end in range(len(actions)):
            if len(waves) <= limit and actions[: end + 1] not in nodes:
                line = encode(actions[end] + "\n")
                waves.append((Node(nodes[actions[:end]], None, (), len(line)),))
                nodes[actions[: end + 1]] = len(waves) - 1
    return Job(f"crossword {number}", tuple(waves), num_prepared=1)


def session_job(trace: Any, vocabulary: range, salt: int, *, limit: int) -> Job:
    """Makes an agent's session: each request forks the earlier one whose input goes along furthest.

    One token stands for a block of 64. Sub-agents that overlap run side by side, request by
    request; everything else in the order of its beginning. Times between requests are left out.

    Args:
        trace: A file of `claude-code`.
        vocabulary: Token ids to draw from.
        salt: As of `game24_job`.
        limit: Most waves.
    """
    seen: list[tuple[list[int], int]] = []
    waves = []
    for requests in list(_rounds(trace["requests"]))[:limit]:
        wave, inputs = [], []
        for request in requests:
            ids = [salt, *(_token(request["model"], b, vocabulary) for b in request["hash_ids"])]
            decode = max(1, round(request["out"] / SCALE))
            wave.append(_continued(ids, decode, seen))
            inputs.append((ids, decode))
        seen += inputs
        waves.append(tuple(wave))
    return Job("agent session", tuple(waves))


def _continued(ids: list[int], decode: int, seen: Sequence[tuple[list[int], int]]) -> Node:
    """Makes a request of the earlier one that shares most, with at least one token given."""
    lengths = [_common(ids, earlier) for earlier, _ in seen]
    shared = max(lengths, default=0)
    if shared == 0:
        return Node(None, None, tuple(ids), decode)
    parent = lengths.index(shared)  # the first: of two alike, an agent goes on with its own
    earlier, answered = seen[parent]
    if shared == len(earlier) and len(ids) > shared + answered:
        # It goes on behind the answer, which stands in the input and is in KV already.
        return Node(parent, None, tuple(ids[shared + answered :]), decode)
    at = min(shared, len(ids) - 1)
    return Node(parent, at, tuple(ids[at:]), decode)


def _rounds(requests: Sequence[Any]) -> Iterator[list[Any]]:
    """Yields what runs at once: one request, or one of each sub-agent that overlaps others."""
    begun = [(_begin(request), number) for number, request in enumerate(requests)]
    group: list[Any] = []
    end = 0.0
    for start, number in sorted(begun):
        request = requests[number]
        if group and (request["type"] != "subagent" or start >= end):
            yield from _side_by_side(group)
            group = []
        if request["type"] == "subagent":
            group.append(request["requests"])
            end = max(end, request["t"])
        else:
            yield [request]
    yield from _side_by_side(group)


def _side_by_side(agents: Sequence[Sequence[Any]]) -> Iterator[list[Any]]:
    for number in range(max((len(agent) for agent in agents), default=0)):
        yield [agent[number] for agent in agents if number < len(agent)]


def _begin(request: Any) -> float:
    return float(request["t"] - request.get("duration_ms", 0) / 1000)


def _token(model: str, block: int, vocabulary: range) -> int:
    """Stands for a block; models share no KV, so their blocks are others."""
    mixed = (block * 2654435761 + sum(model.encode())) % len(vocabulary)
    return vocabulary[mixed]


def _common(left: Sequence[int], right: Sequence[int]) -> int:
    """Counts the tokens that two inputs begin with alike."""
    for position, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return position
    return min(len(left), len(right))
