"""What happens to a model at start, with a GPU's answers faked: memory, capture, what fits."""

import logging
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from tiny_engines import load_tiny

from agentkv.config import EngineConfig, SchedulerConfig
from agentkv.core.head_logits import KEPT_HEADS
from agentkv.engine.pool_size import MemoryFacts
from agentkv.engine.serving_model import ServingModel, capture_graphs
from agentkv.errors import InvalidRequest
from agentkv.model.fused_linear import FusedProjection
from agentkv.model.model_runner import ModelRunner

SMALL = SchedulerConfig(token_budget=24, max_running=6)


def silent(_: str) -> None:
    pass


class CountingMemory:
    """A device of 100 bytes whose works take 7 bytes each."""

    def __init__(self) -> None:
        self.num_works = 0

    def total(self) -> int:
        return 100

    def free(self) -> int:
        return 60

    def peak_of(self, work: Callable[[], object]) -> int:
        self.num_works += 1
        work()
        return 7


def prepare(config: EngineConfig) -> ServingModel:
    return ServingModel.prepare(load_tiny(), config, silent)


def on_gpu(serving: ServingModel, **asked: object) -> ServingModel:
    """The same with a config for a GPU: what follows does not ask torch for one."""
    config = EngineConfig(device="cuda", block_size=4, scheduler=SMALL, **asked)  # type: ignore[arg-type]  # options by name
    return replace(serving, config=config)


def is_fused(serving: ServingModel) -> bool:
    return any(isinstance(module, FusedProjection) for module in serving.model.modules())


def test_projections_are_packed_when_asked() -> None:
    """Catches an option without effect, and packing where it does not pay."""
    assert is_fused(prepare(EngineConfig(fuse_weights=True)))
    assert not is_fused(prepare(EngineConfig()))


def test_the_largest_step_and_graph_are_measured() -> None:
    """Catches a pool that leaves no room for steps, graphs, or the heads that contexts keep."""
    serving = on_gpu(prepare(EngineConfig()))
    memory = CountingMemory()
    heads = KEPT_HEADS * 4 * serving.shape.vocab_size
    assert serving.measure(memory) == MemoryFacts(100, 60, 2 * 7 + heads)
    assert memory.num_works == 2
    without = on_gpu(serving, graphs=False).measure(memory)
    assert without.step == 7 + heads


def test_graphs_reach_as_far_as_branches_can_decode_together() -> None:
    """Catches graphs for steps that the scheduler never makes."""
    assert on_gpu(prepare(EngineConfig())).max_graph_rows == SMALL.max_running


def test_a_model_that_cannot_be_captured_is_served_without_graphs(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Catches a start that fails because a model reads the device between its layers."""

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    runner = prepare(EngineConfig()).runner(num_blocks=2)
    assert capture_graphs(runner, 2, silent)
    monkeypatch.setattr(ModelRunner, "capture_graphs", fail)
    with caplog.at_level(logging.WARNING):
        assert not capture_graphs(runner, 2, silent)
    assert "No CUDA graphs" in caplog.text


def test_running_out_of_memory_says_what_did_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a traceback of torch's that does not say which option to change."""

    class Full(CountingMemory):
        def peak_of(self, work: Callable[[], object]) -> int:
            raise torch.OutOfMemoryError("CUDA out of memory.")

    serving = prepare(EngineConfig(scheduler=SMALL))
    with pytest.raises(InvalidRequest, match=r"A step of 24 tokens does not fit .* token budget"):
        serving.measure(Full())


def test_batch_invariance_pads_to_the_token_budget() -> None:
    """Catches matrix products of other shapes in a mode that promises equal bits."""
    serving = on_gpu(prepare(EngineConfig()), batch_invariant=True)
    runner = serving.runner(num_blocks=2)
    assert runner._fixed_rows == SMALL.token_budget
    assert runner._options.batch_invariant


def test_an_8_bit_pool_counts_numbers_and_factors() -> None:
    """Catches a pool sized for 16 bits, or one that forgets its factors."""
    plain = on_gpu(prepare(EngineConfig()))
    packed = on_gpu(plain, kv_dtype="int8")
    assert packed.kv_dtype == torch.int8
    assert plain.bytes_per_block == 2 * 2 * 4 * 2 * 8 * 4
    assert packed.bytes_per_block == 2 * 2 * 4 * 2 * (8 + 4)
    kv = packed.runner(num_blocks=3).kv
    assert kv.bytes_per_block == packed.bytes_per_block
