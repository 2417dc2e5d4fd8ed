"""Traces as small as can be, in the formats that the evaluation reads."""

import json
from pathlib import Path
from typing import Any

MODEL = "model"


def write_traces(folder: Path) -> Path:
    """Writes one of each; returns the folder."""
    write_agent(folder, _agent())
    (folder / "azure").mkdir()
    rows = [f"2023-11-16 18:15:{46 + n}.6805900,{30 + n},{5 + n}" for n in range(6)]
    text = "\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]) + "\n"
    (folder / "azure" / "llm_2023_conv.csv").write_text(text)
    (folder / "mooncake").mkdir()
    lines = [
        {"timestamp": 1000 * n, "input_length": 700, "output_length": 64, "hash_ids": [0, 1 + n]}
        for n in range(4)
    ]
    path = folder / "mooncake" / "conversation_trace.jsonl"
    path.write_text("\n".join(json.dumps(line) for line in lines) + "\n")
    return folder


def write_agent(folder: Path, requests: list[dict[str, Any]]) -> None:
    """Writes one agent's session."""
    (folder / "claude-code").mkdir(exist_ok=True)
    trace = {"tool_tokens": 128, "requests": requests}
    (folder / "claude-code" / "trace_0001.json").write_text(json.dumps(trace))


def call(t: float, num_in: int, num_out: int, ids: list[int], pause: float = 0.0) -> dict[str, Any]:
    """One request of an agent."""
    return {
        "t": t,
        "type": "n",
        "model": MODEL,
        "in": num_in,
        "out": num_out,
        "hash_ids": ids,
        "think_time": pause,
    }


def helper(t: float, seconds: float, requests: list[dict[str, Any]]) -> dict[str, Any]:
    """A sub-agent that ended at `t`."""
    return {"t": t, "type": "subagent", "duration_ms": 1000 * seconds, "requests": requests}


def _agent() -> list[dict[str, Any]]:
    """Three requests: the second goes on from the first, the third drops half of it."""
    own = [call(0.0, 130, 10, [90, 91]), call(1.0, 200, 10, [90, 91, 92], 0.5)]
    other = [call(0.0, 140, 12, [90, 91])]
    return [
        call(0.0, 320, 20, [1, 2, 3, 4, 5]),
        helper(3.0, 2.0, own),
        helper(4.0, 3.0, other),
        call(5.0, 400, 30, [1, 2, 3, 4, 5, 6], 1.5),
        call(9.0, 256, 10, [1, 2, 7, 8], 2.0),
    ]
