"""The examples do what they claim, on the embedded model behind a real server."""

import asyncio
import re
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

import pytest
from accounts import Resend
from local_tools import calculate, convert, lookup
from repository import ROOT
from tree_drawing import Drawn, draw

from agentkv.config import EngineConfig, ServerConfig
from agentkv.engine.async_engine import AsyncEngine
from agentkv.engine.build import build_engine
from agentkv.server.main import Server

EXAMPLES = ("parallel_sampling", "tree_of_thought", "tool_plan")


class Run(NamedTuple):
    """One example, run to its end."""

    exit_code: int
    output: str
    errors: str
    num_live_blocks: int
    """Blocks that contexts held on the server afterwards."""

    def number(self, label: str) -> int:
        """Finds the number that the report prints beside a label."""
        (found,) = re.findall(rf"^  {label} +([\d,]+)", self.output, re.MULTILINE)
        return int(found.replace(",", ""))


@pytest.fixture(scope="module")
def runs() -> dict[str, Run]:
    """Runs every example once against one server."""

    async def scenario() -> dict[str, Run]:
        engine = AsyncEngine(build_engine(EngineConfig(model="smollm2", num_blocks=256)))
        async with Server(engine, ServerConfig(port=0)) as server:
            return {name: await run(name, server.address, engine) for name in EXAMPLES}

    return asyncio.run(scenario())


async def run(name: str, address: str, engine: AsyncEngine) -> Run:
    """Runs one example as a newcomer would."""
    done = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, f"examples/{name}.py", address],
        cwd=ROOT,
        capture_output=True,
        encoding="utf-8",
        timeout=200,
    )
    live = (await engine.view()).pool.live
    return Run(done.returncode, done.stdout, done.stderr, live)


@pytest.mark.slow
@pytest.mark.parametrize("name", EXAMPLES)
def test_runs_and_leaves_nothing_behind(runs: dict[str, Run], name: str) -> None:
    """Catches an example that no longer fits the SDK, or forgets to release a context."""
    assert (runs[name].exit_code, runs[name].errors) == (0, "")
    assert runs[name].num_live_blocks == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", EXAMPLES)
def test_totals_show_what_sharing_saved(runs: dict[str, Run], name: str) -> None:
    """Catches branches that share nothing, and totals that contradict each other."""
    computed = runs[name].number("by the server, for all calls")
    resent = runs[name].number("if each call resent its path")
    assert 0 < computed < runs[name].number("the same, with a prefix cache") < resent
    assert 0 < runs[name].number("by the server") < runs[name].number("if nothing were shared")


@pytest.mark.slow
def test_majority_is_right(runs: dict[str, Run]) -> None:
    """Catches votes that are lost or read wrongly, and branches that all say the same."""
    output = runs["parallel_sampling"].output
    votes = {
        answer: int(count) for answer, count in re.findall(r"^ +(\w+) +(\d+) #+$", output, re.M)
    }
    assert max(votes, key=lambda answer: votes[answer]) == "rainbow"
    assert len(votes) > 1
    assert f"Majority: rainbow, {votes['rainbow']} of {sum(votes.values())} votes" in output


@pytest.mark.slow
def test_search_keeps_the_rules_and_goes_back_when_stuck(runs: dict[str, Run]) -> None:
    """Catches a search that breaks its own rules, or that never forks from an earlier token."""
    output = runs["tree_of_thought"].output
    (solved,) = re.findall(r"^Solved: (.+)$", output, re.MULTILINE)
    words = solved.split()
    assert len(words) == len(set(words)) == 6
    assert all(before[-1] == after[0] for before, after in pairwise(words))
    assert "stuck" in output and "again from here" in output


@pytest.mark.slow
def test_best_plan_is_kept(runs: dict[str, Run]) -> None:
    """Catches a tool's result that never reached its branch, and a score that prefers nonsense."""
    output = runs["tool_plan"].output
    assert output.endswith("Kept: convert(6 feet to inches). Answer: 72 inches\n")
    assert output.count("\n    answer: ") == 3


def test_resend_counts_whole_paths_and_cached_blocks() -> None:
    """Catches a comparison that flatters us: what others compute is counted by hand here."""
    resend = Resend()
    resend.call([1, 2, 3, 4, 5, 6], num_sent=5, block_size=2)
    assert (resend.num_tokens, resend.num_missed_tokens) == (5, 5)
    # A sibling: [1, 2] and [3, 4] are cached, the last token sent is computed nevertheless.
    resend.call([1, 2, 3, 4, 7, 8], num_sent=5, block_size=2)
    assert (resend.num_tokens, resend.num_missed_tokens) == (10, 6)
    # The same call again: the block that holds the last token sent is no hit.
    resend.call([1, 2, 3, 4, 7, 8], num_sent=4, block_size=2)
    assert (resend.num_tokens, resend.num_missed_tokens) == (15, 9)


def test_tree_hides_released_leaves_only() -> None:
    """Catches a drawing that loses what hangs below a released context."""
    root = Drawn(parent_id=None, fork_position=0, length=5, note="root", info=None)
    branch, leaf = (root._replace(parent_id="root", note=note) for note in ("inner", "leaf"))
    tree = {"root": root, "inner": branch, "leaf": leaf, "below": leaf._replace(parent_id="inner")}
    assert draw(tree) == [
        "5 tokens, released  root",
        "├─ 5 tokens, forked at 0, released  inner",
        "│  └─ 1 released",
        "└─ 1 released",
    ]


def test_tools_answer() -> None:
    """Catches a tool that computes wrongly."""
    assert convert("6 feet to inches") == "72 inches"
    assert convert("90 minutes to hours") == "1.5 hours"
    assert [calculate(call) for call in ("5 * 6", "7/2", "3 - 8")] == ["30", "3.5", "-5"]
    assert lookup("tables") == "a table is a flat top on legs"


@pytest.mark.parametrize(
    ("tool", "call"),
    [
        (convert, "3 feet to hours"),
        (convert, "3 bags to feet"),
        (convert, ""),
        (calculate, "1 / 0"),
        (calculate, "9 ** 9"),
        (calculate, "__import__('os')"),
        (lookup, "unheard"),
    ],
)
def test_tools_refuse(tool: Callable[[str], str], call: str) -> None:
    """Catches a tool that runs what a model wrote, or fails with anything but a clear refusal."""
    with pytest.raises(ValueError, match=r"this is not|is not length|is not time|by zero"):
        tool(call)
