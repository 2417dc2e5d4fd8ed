"""The whole engine on the Triton kernels, with graphs, against plain transformers."""

from slow_twin import PlainModel, TwinBench
from tiny_engines import TinyEngine
from tiny_models import VOCAB_SIZE, build_tiny_model

from agentkv.config import SchedulerConfig
from agentkv_kernels.work_buffers import Buckets

TEXT = [(7 * i + 31 * i * i + 1) % VOCAB_SIZE for i in range(20)]


def test_a_tree_on_triton_equals_its_twin() -> None:
    """Catches whatever makes a branch on a GPU differ from the same tokens run alone."""
    scheduler = SchedulerConfig(token_budget=24, chunk_size=7)
    made = TinyEngine(
        build_tiny_model("llama"),
        num_blocks=24,
        block_size=4,
        scheduler=scheduler,
        implementation="triton",
        max_graph_rows=4,
        make_levels=lambda _: (Buckets(16, 0, 16, 0), Buckets(16, 16, 16, 64)),
    )
    bench = TwinBench(PlainModel.of("llama"), made)
    bench.create(TEXT[:14])
    bench.run()
    (root,) = bench.tokens
    first, second = bench.fork(root, count=2, at=13)
    bench.extend(first, TEXT[3:8], logprobs=True)
    bench.generate(second, 3, temperature=1.0, seed=7)
    bench.generate_branches(root, 2, 3, at=9)
    bench.run()
    bench.truncate(second, 12)
    bench.generate(second, 3)
    bench.generate(first, 2)
    bench.score(root, [TEXT[:2], TEXT[4:5]])
    bench.run()
    bench.check_leaves(TEXT[3:5])
    bench.close()
    assert made.runner.statistics().num_graph_steps > 3
