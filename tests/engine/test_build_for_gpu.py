"""The start for a GPU from end to end, on CPU tensors: only what torch.cuda says is made up."""

from collections.abc import Callable
from typing import Any

import pytest
from tiny_engines import load_tiny

from agentkv.config import EngineConfig, SchedulerConfig
from agentkv.engine import build
from agentkv.engine.build import build_engine_for
from agentkv.engine.engine import Engine
from agentkv.engine.serving_model import capture_graphs
from agentkv.errors import InvalidRequest
from agentkv.model.model_runner import ModelRunner
from agentkv.sampling_params import SamplingParams

TENANT = "tenant"
PROMPT = [5, 17, 3, 88, 41, 9, 60]
SCHEDULER = SchedulerConfig(token_budget=24, max_running=6)


class MadeUpMemory:
    """A GPU of 8 MiB, a quarter of it taken; each work takes 1 MiB."""

    def total(self) -> int:
        return 8 << 20

    def free(self) -> int:
        return 6 << 20

    def peak_of(self, work: Callable[[], object]) -> int:
        work()
        return 1 << 20


@pytest.fixture
def runners(monkeypatch: pytest.MonkeyPatch) -> list[ModelRunner]:
    """Makes up the memory; keeps the runners that graphs were captured for."""
    kept: list[ModelRunner] = []

    def capture(runner: ModelRunner, max_rows: int, report: Callable[[str], None]) -> bool:
        kept.append(runner)
        return capture_graphs(runner, max_rows, report)

    monkeypatch.setattr(build, "memory_of", lambda _: MadeUpMemory())
    monkeypatch.setattr(build, "capture_graphs", capture)
    return kept


def config(device: str = "cuda", **options: Any) -> EngineConfig:
    return EngineConfig(device=device, block_size=4, scheduler=SCHEDULER, **options)


def answers(engine: Engine) -> list[list[int]]:
    """Greedy and sampled tokens of branches that decode together."""
    context = engine.run(engine.contexts.create(TENANT, PROMPT)).answer.context.id
    branches = [view.id for view in engine.contexts.fork(TENANT, context, count=3)]
    calls = [
        engine.inference.generate(
            TENANT, branch, SamplingParams(max_tokens=6, temperature=heat, seed=3)
        )
        for branch, heat in zip(branches, (0.0, 1.0, 0.7), strict=True)
    ]
    for call in calls:
        engine.run(call)
    return [list(engine.observer.tokens(TENANT, branch)) for branch in branches]


def test_an_engine_for_a_gpu_answers_like_one_for_a_cpu(runners: list[ModelRunner]) -> None:
    """Catches a start whose parts do not fit together: it would show on the first GPU only."""
    lines: list[str] = []
    on_cpu = build_engine_for(load_tiny(), config("cpu", num_blocks=64))
    on_gpu = build_engine_for(load_tiny(), config(), lines.append)
    assert answers(on_gpu) == answers(on_cpu)
    assert runners[0].statistics().num_graph_steps > 3
    assert "Measuring the largest step" in lines
    assert "Capturing CUDA graphs: 1 of 4, 6 rows" in lines


def test_the_pool_takes_what_was_measured_to_be_left(runners: list[ModelRunner]) -> None:
    """Catches a pool sized by the CPU's rule, or before the step was measured."""
    view = build_engine_for(load_tiny(), config(memory_utilization=1.0)).view()
    kept_heads = 256 * 4 * view.model.vocab_size
    left = (8 << 20) - (2 << 20) - 2 * (1 << 20) - kept_heads
    assert view.pool.total == left // view.model.bytes_per_block
    with pytest.raises(InvalidRequest, match="No block of KV fits"):
        build_engine_for(load_tiny(), config(memory_utilization=0.3))


def test_graphs_can_be_left_out(runners: list[ModelRunner]) -> None:
    """Catches an option without effect."""
    build_engine_for(load_tiny(), config(graphs=False))
    assert runners == []
