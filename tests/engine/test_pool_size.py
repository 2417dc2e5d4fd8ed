"""How many blocks the pool gets, from numbers that are given: no GPU is asked."""

from typing import Any

import pytest

from agentkv.config import EngineConfig
from agentkv.engine.pool_size import MemoryFacts, choose_num_blocks
from agentkv.errors import InvalidRequest

GIB = 1 << 30
BLOCK = 2 << 20
FACTS = MemoryFacts(total=80 * GIB, free=60 * GIB, step=2 * GIB)


def choose(facts: MemoryFacts = FACTS, *, device: str = "cuda", **asked: Any) -> int:
    config = EngineConfig(device=device, **asked)
    return choose_num_blocks(config, BLOCK, facts, on_gpu=config.is_on_gpu)


def test_a_gpus_pool_takes_its_share_less_weights_and_steps() -> None:
    """Catches a pool that leaves no room for the activations of a full step."""
    assert choose() == (72 - 20 - 2) * GIB // BLOCK
    assert choose(memory_utilization=0.5) == (40 - 20 - 2) * GIB // BLOCK
    assert choose(memory_utilization=1.0) == (80 - 20 - 2) * GIB // BLOCK


def test_a_pool_that_does_not_fit_a_gpu_is_refused_with_numbers() -> None:
    """Catches an out-of-memory error at the first full step in place of a refusal at start."""
    assert choose(kv_memory=58 * GIB) == 58 * GIB // BLOCK
    assert choose(num_blocks=100) == 100
    said = r"pool of 59.00 GiB does not fit: 60.00 GiB of 80.00 GiB are free, .* At most 58.00 GiB"
    with pytest.raises(InvalidRequest, match=said):
        choose(kv_memory=59 * GIB)
    with pytest.raises(InvalidRequest, match=said):
        choose(num_blocks=59 * GIB // BLOCK)


def test_a_gpu_without_room_for_a_block_says_what_takes_the_memory() -> None:
    """Catches a pool of no blocks, or of a negative number of them."""
    with pytest.raises(InvalidRequest, match=r"72.00 GiB, of which 75.00 GiB are held already"):
        choose(FACTS._replace(free=5 * GIB))
    with pytest.raises(InvalidRequest, match="does not fit"):
        choose(FACTS._replace(free=1 * GIB), num_blocks=1)


def test_a_cpus_pool_takes_a_part_of_what_is_free() -> None:
    """Catches a pool that takes the memory of everything else on the computer."""
    cpu = MemoryFacts(total=64 * GIB, free=10 * GIB, step=0)
    assert choose(cpu, device="cpu") == 2 * GIB // BLOCK
    assert choose(cpu._replace(free=60 * GIB), device="cpu") == 4 * GIB // BLOCK
    assert choose(cpu, device="cpu", kv_memory=100 * GIB) == 100 * GIB // BLOCK
    with pytest.raises(InvalidRequest, match="does not hold one block"):
        choose(cpu, device="cpu", kv_memory=BLOCK - 1)
