"""The benchmark of the wire: that it runs, and tells bare gRPC and AgentKV apart."""

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_what_a_message_costs_is_measured_on_both_ends(tmp_path: Path) -> None:
    """Catches a server or a client that the benchmark was left behind by."""
    report = tmp_path / "wire.json"
    subprocess.run(
        [
            *(sys.executable, "-m", "benchmarks.wire", "--json", str(report)),
            *("--messages", "20", "--period", "1"),
        ],
        check=True,
        timeout=120,
        capture_output=True,
    )
    results = json.loads(report.read_text(encoding="utf-8"))["results"]
    assert [(one["engine"], one["metric"].partition(",")[0]) for one in results] == [
        ("in process", "engine"),
        ("bare gRPC", "server"),
        ("bare gRPC", "client"),
        ("agentkv", "server"),
        ("agentkv", "client"),
    ]
    assert all(one["median"] > 0 for one in results if one["metric"].startswith("client"))
