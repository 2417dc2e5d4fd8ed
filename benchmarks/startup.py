"""How long a start takes: the first one, which converts, and later ones against a bare script.

    python -m benchmarks.startup [--json FILE] [--runs N]

A start is `agentkv serve` from the command to its READY line: libraries, weights, the comparison
with the model's own attention, the pool, the port. A bare script imports torch and transformers
and loads the same folder. Each run is a process of its own; the two kinds alternate, so that a
busy machine disturbs both alike.
"""

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from agentkv.model.catalog import list_models
from benchmarks.report import Report, Result, Target, parser_for

MODEL = "smollm2"
FIRST_START_SECONDS = 40.0
LATER_START_RATIO = 1.2

SERVE = ["-m", "agentkv", "serve", "--model", MODEL, "--port", "0", "--kv-memory", "1GiB"]
BARE = """
import sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
AutoTokenizer.from_pretrained(sys.argv[1])
AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32).eval()
"""


def main() -> None:
    """Measures, prints one table and writes the JSON file if one is asked for."""
    parser = parser_for(__doc__)
    parser.add_argument("--runs", type=int, default=7, help="later starts of each kind")
    options = parser.parse_args()
    measure(options.runs).publish(options.json)


def measure(num_runs: int) -> Report:
    """Runs one first start, and `num_runs` later ones of each kind after one to warm up."""
    with tempfile.TemporaryDirectory() as cache:
        environment = os.environ | {"XDG_CACHE_HOME": cache, "HF_HUB_OFFLINE": "1"}
        first = _seconds_to_ready(environment)
        root = Path(cache) / "agentkv" / "models"
        (folder,) = (str(entry.path) for entry in list_models(root) if entry.alias.name == MODEL)
        ours, bare = [], []
        for number in range(num_runs + 1):
            pair = _seconds_to_ready(environment), _seconds_of_bare(environment, folder)
            if number > 0:
                ours.append(pair[0])
                bare.append(pair[1])
    ratio = statistics.median(ours) / statistics.median(bare)
    return Report(
        name="startup",
        results=(
            Result.of("first start", "agentkv", "time to ready", "s", [first]),
            Result.of("later start", "agentkv", "time to ready", "s", ours),
            Result.of("later start", "bare transformers", "process time", "s", bare),
        ),
        targets=(
            Target.at_most("first start, conversion included, s", first, FIRST_START_SECONDS),
            Target.at_most("later start over bare script", ratio, LATER_START_RATIO),
        ),
    )


def _seconds_to_ready(environment: Mapping[str, str]) -> float:
    """Starts a server, waits until it is ready, stops it; returns how long the start took."""
    start = time.perf_counter()
    with subprocess.Popen(
        [sys.executable, *SERVE],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as server:
        assert server.stdout is not None
        is_ready = any(line.startswith("READY") for line in server.stdout)
        seconds = time.perf_counter() - start
        server.terminate()
    if not is_ready:
        sys.exit(f"The server ended with {server.returncode} before it was ready.")
    return seconds


def _seconds_of_bare(environment: Mapping[str, str], folder: str) -> float:
    """Runs the bare script in a new process and returns how long the process took."""
    start = time.perf_counter()
    subprocess.run(
        [sys.executable, "-c", BARE, folder],
        env=environment,
        check=True,
        stderr=subprocess.DEVNULL,
    )
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
