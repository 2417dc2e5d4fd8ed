"""The line fitted through the times of steps, and the benchmark that measures them."""

import pytest
from tiny_models import build_tiny_model

from agentkv.core.step_cost import StepCost, StepWork
from agentkv.model.attention import use_agentkv_attention
from agentkv.model.kv_cache import KVCache
from agentkv.model.model_runner import ModelRunner
from agentkv.model.model_shape import describe_model
from agentkv.model.sampler import Sampler
from benchmarks import step_cost

COST = StepCost(0.02, 1e-3, 2e-6, 1e-7)


def points(cost: StepCost, *, extra: float = 0.0) -> list[step_cost.Point]:
    """A grid as it would be measured; `extra` is what a shared token costs per pair of branches."""
    found = []
    for count in (1, 4, 16):
        for prefix in (128, 1024, 4096):
            work = StepWork(count, prefix + 16 * count, (prefix + 16) * count)
            seconds = cost.seconds(work) + extra * prefix * count * (count - 1)
            found.append(step_cost.Point(count, prefix, work, (seconds,)))
    return found


def test_a_fit_finds_the_cost_that_made_the_times() -> None:
    """Catches swapped columns, and weights that move the line."""
    fit = step_cost.fit_cost(points(COST))
    assert fit.cost.fixed == pytest.approx(COST.fixed)
    assert fit.cost.per_row == pytest.approx(COST.per_row)
    assert fit.cost.per_shared_token(16) == pytest.approx(2e-6 + 16e-7)
    assert fit.r_squared == pytest.approx(1.0)
    assert fit.worst < 1e-6


@pytest.mark.parametrize(("extra", "met"), [(0.0, True), (1e-6, False)])
def test_shared_tokens_must_not_get_dearer_than_their_arithmetic(extra: float, met: bool) -> None:
    """Catches a target that any engine would meet."""
    measured = points(COST, extra=extra)
    report = step_cost.report(measured, step_cost.fit_cost(measured))
    assert report.targets[0].met == met


def test_a_grid_is_measured() -> None:
    """Catches a benchmark that the runner has moved away from."""
    model = build_tiny_model("llama")
    use_agentkv_attention(model)
    runner = ModelRunner(
        model, KVCache(describe_model(model), num_blocks=8, block_size=16), Sampler()
    )
    runner.kv.poison(0.0)
    grid = step_cost.Grid((1, 2), (16, 32), repeats=2)
    measured = step_cost.measure(runner, grid)
    assert [(point.num_branches, point.prefix) for point in measured] == [
        (1, 16), (1, 32), (2, 16), (2, 32),
    ]  # fmt: skip
    assert all(len(point.seconds) == 2 and point.fastest > 0 for point in measured)
    assert runner.statistics().num_steps == 4 * 3
