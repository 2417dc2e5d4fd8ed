"""What the kernels become on an H200, known without one: compiled for sm_90 and read back.

Few configurations here; `python -m agentkv_kernels.compile_report` shows all. They are compiled in
one process of its own, so that it does not matter whether this one interprets kernels.
"""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

Compiled = Mapping[str, Mapping[str, int]]

SCRIPT = """
import dataclasses, json
from agentkv_kernels._triton.tile_config import TileConfig
from agentkv_kernels.compile_report import attention, compile_configuration, configurations
few = {
    "small": attention(),
    "large": attention(large=True),
    "large, window and sinks": attention(
        head_dim=64, group=8, large=True, window=True, sinks=True
    ),
    "small, 2 stages": attention(tile=TileConfig(16, 64, 4, 2)),
    "small, 4 stages": attention(tile=TileConfig(16, 64, 4, 4)),
    "large, 2 stages": attention(tile=TileConfig(64, 32, 4, 2), large=True),
}
few |= {one.name: one for one in configurations()
        if one.name in ("merge d128", "store d128 bf16", "copy")}
print(json.dumps({name: dataclasses.asdict(compile_configuration(one))
                  for name, one in few.items()}))
"""


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Compiled:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("triton"))
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env=environment,
        cwd=root,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: Compiled = json.loads(done.stdout)
    return found


@pytest.mark.slow
def test_nothing_is_spilled(compiled: Compiled) -> None:
    """Catches a change that makes every step of the loop go through memory."""
    assert {name: one["spilled_bytes"] for name, one in compiled.items()} == dict.fromkeys(
        compiled, 0
    )


@pytest.mark.slow
def test_two_programs_fit_a_multiprocessor(compiled: Compiled) -> None:
    """Catches tiles so large that a program's latency is not hidden by another's."""
    for name in ("small", "large", "large, window and sinks"):
        assert compiled[name]["programs_by_shared"] >= 2, name
        assert compiled[name]["programs_by_registers"] >= 2, name


@pytest.mark.slow
def test_large_tiles_use_wgmma(compiled: Compiled) -> None:
    """Catches a tile that falls back to the slower instructions of older devices."""
    for name, one in compiled.items():
        if name.startswith("large"):
            assert one["hgmma"] > 0, name
            assert one["hmma"] == 0, name
    assert compiled["small"]["hmma"] > 0


@pytest.mark.slow
def test_more_stages_prefetch_more(compiled: Compiled) -> None:
    """Catches block ids loaded where the compiler cannot look ahead: one tile in flight only."""
    depths = ("small, 2 stages", "small", "small, 4 stages")
    for measure in ("ldgsts", "shared_bytes"):
        two, three, four = (compiled[name][measure] for name in depths)
        assert two < three < four, measure
    assert compiled["large, 2 stages"]["ldgsts"] < compiled["large"]["ldgsts"]


@pytest.mark.slow
def test_the_report_is_written(tmp_path: Path) -> None:
    """Catches the command line of the report broken, which only people with a change run."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path / "cache")
    command = [sys.executable, "-m", "agentkv_kernels.compile_report", "--only", "copy"]
    file = tmp_path / "report.json"
    subprocess.run([*command, "--json", str(file)], env=environment, check=True)
    report = json.loads(file.read_text(encoding="utf-8"))
    assert [one["name"] for one in report["configurations"]] == ["copy"]
