"""The runner on the Triton kernels: the golden check, graphs from work lists, exact bits."""

import pytest
import torch
from hand_forked import HandBranch, HandForked
from tiny_models import build_tiny_model
from torch import Tensor

from agentkv.model.golden_check import check_model
from agentkv.model.kv_cache import KV_DTYPES
from agentkv.model.model_shape import describe_model
from agentkv.model.sampler import Sampler
from agentkv.model.step_graph import Rerun
from agentkv_kernels.work_buffers import Buckets

TOLERANCE = 1e-5
LEVELS = (Buckets(16, 0, 16, 0), Buckets(16, 16, 16, 64))
"""Far fewer programs than on a GPU, where those without work cost nothing; the first has no room
for partial results, so that only a branch alone is served by it."""
PROMPT = [5, 17, 3, 88, 41, 9, 60]


def silent(_: str) -> None:
    pass


def steps(run: HandForked) -> list[Tensor]:
    """A prompt worth sharing, two branches forked inside a block, four steps, one of them alone."""
    root = run.create()
    seen = run.step((root, [*PROMPT, *range(90)]))
    branches = [root, run.fork(root, 94), run.fork(root, 97)]
    for turn in range(3):
        seen += run.step(*((branch, [7 * turn + i]) for i, branch in enumerate(branches)))
    return seen + run.step((branches[1], [44]))


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_the_golden_check_passes(family: str) -> None:
    """Catches kernels that the runner calls with the wrong plan, window, cap or layout."""
    model = build_tiny_model(family)
    shape = describe_model(model)
    report = check_model(model, shape, Sampler(), block_size=16, implementation="triton")
    assert report.error < 1e-4


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_the_golden_check_passes_on_8_bit_kv(kv_dtype: str) -> None:
    """Catches factors that are stored, copied on write or read for another token."""
    model = build_tiny_model("llama")
    report = check_model(
        model,
        describe_model(model),
        Sampler(),
        block_size=4,
        implementation="triton",
        kv_dtype=KV_DTYPES[kv_dtype],
    )
    assert 1e-4 < report.error < report.tolerance


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_graphs_from_work_lists_change_no_answer(family: str) -> None:
    """Catches a work list that is stale, of another window, or longer than what is started."""
    plain = HandForked(build_tiny_model(family), implementation="triton")
    graphed = HandForked(build_tiny_model(family), implementation="triton")
    used: list[int] = []
    graphs = iter(range(6))
    graphed.runner.capture_graphs(
        4, silent, make_graph=lambda: Noted(next(graphs), used), make_levels=lambda _: LEVELS
    )
    for ours, theirs in zip(steps(graphed), steps(plain), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=TOLERANCE)
    assert graphed.runner.statistics().num_graph_steps == 4
    assert graphed.runner.statistics().num_plan_advances == 2
    assert used == [0, 0, 0, 5]  # three branches that share, padded to four rows; one alone


class Noted(Rerun):
    """Notes its number at each replay: graphs are made from the largest to the smallest."""

    def __init__(self, number: int, used: list[int]) -> None:
        super().__init__()
        self._number, self._used = number, used

    def replay(self) -> None:
        self._used.append(self._number)
        super().replay()


def logits_of_a_branch(siblings: int) -> Tensor:
    """Prefills and decodes one branch, always row 0, beside others."""
    run = HandForked(
        build_tiny_model("llama"), implementation="triton", batch_invariant=True, fixed_rows=8
    )
    root = run.create()
    seen = run.step((root, PROMPT))
    others: list[HandBranch] = [run.fork(root) for _ in range(siblings)]
    for turn in range(2):
        seen += run.step((root, [turn + 4]), *((other, [9]) for other in others))[:1]
    return torch.cat(seen)


def test_siblings_do_not_change_a_bit() -> None:
    """Catches a batch-invariant mode whose sums depend on what runs beside a branch."""
    assert torch.equal(logits_of_a_branch(0), logits_of_a_branch(5))
