"""The tiers at start: their sizes, their folder, and what is refused before anything is served."""

from dataclasses import replace
from pathlib import Path

import pytest
from tiny_models import build_tiny_model

from agentkv.config import EngineConfig
from agentkv.engine.cost_meter import CostMeter
from agentkv.engine.pool_size import choose_num_disk_blocks, choose_num_host_blocks
from agentkv.engine.tiers import build_tiers
from agentkv.errors import InvalidRequest
from agentkv.model.kv_cache import KVCache
from agentkv.model.model_shape import describe_model


def test_the_host_tier_is_as_large_as_the_pool_if_memory_allows() -> None:
    """Catches a default that takes the memory that something else needs."""
    config = EngineConfig()
    assert choose_num_host_blocks(config, 100, 1000, free=10_000_000) == 100
    assert choose_num_host_blocks(config, 100, 1000, free=250_000) == 50
    assert choose_num_host_blocks(replace(config, host_blocks=7), 100, 1000, free=0) == 7
    assert choose_num_host_blocks(replace(config, host_memory=5500), 100, 1000, free=0) == 5
    with pytest.raises(InvalidRequest, match="does not hold one block of 1000 bytes"):
        choose_num_host_blocks(replace(config, host_memory=999), 100, 1000, free=0)


def test_disk_is_bounded() -> None:
    """Catches a folder that grows beyond what was granted."""
    config = EngineConfig(disk_dir="kv", disk_bytes=5500)
    assert choose_num_disk_blocks(config, 1000) == 5
    assert choose_num_disk_blocks(EngineConfig(), 1000) == 0
    with pytest.raises(InvalidRequest, match="does not hold one block"):
        choose_num_disk_blocks(config, 6000)


def test_tiers_are_built_as_asked_for(tmp_path: Path) -> None:
    """Catches an option that changes nothing, and files that stay after the end."""
    kv = KVCache(describe_model(build_tiny_model("llama")), num_blocks=6, block_size=4)
    assert build_tiers(kv, EngineConfig(host_blocks=0)).mover is None
    exact = build_tiers(kv, EngineConfig(host_blocks=3))
    small = build_tiers(
        kv, EngineConfig(host_blocks=3, host_kv_dtype="int8", disk_dir=str(tmp_path / "kv"))
    )
    assert small.bytes_per_row < exact.bytes_per_row
    assert small.mover is not None and small.disk_blocks > 0 and exact.disk_blocks == 0
    small.mover.close()
    assert not list((tmp_path / "kv").iterdir())


def test_a_folder_that_cannot_be_made_is_a_clear_error(tmp_path: Path) -> None:
    """Catches a traceback, or a server that drops all it was to keep."""
    kv = KVCache(describe_model(build_tiny_model("llama")), num_blocks=6, block_size=4)
    (tmp_path / "file").touch()
    with pytest.raises(InvalidRequest, match="cannot be used for KV"):
        build_tiers(kv, EngineConfig(disk_dir=str(tmp_path / "file" / "kv")))


def test_costs_are_learned_from_what_ran() -> None:
    """Catches small steps, or steps that failed, taken for the price of a token."""
    now = [0.0]
    meter = CostMeter(lambda: now[0])
    assert meter.costs().moving_pays(16)
    with meter.moving(4):
        now[0] += 4.0
    with meter.computing(1):
        now[0] += 50.0
    assert meter.costs().moving_pays(16), "one row says nothing"
    with meter.computing(100):
        now[0] += 10.0
    assert meter.costs() == (0.1, 2.0)
    assert not meter.costs().moving_pays(16)
    assert meter.costs().moving_pays(32)
