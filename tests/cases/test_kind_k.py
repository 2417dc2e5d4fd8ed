"""Case of kind K that needs contexts: what shares a run is what shares a path.

Others of the kind are tests of the kernels and of the runner.
"""

from bench import Bench, numbers
from slow_twin import PlainModel, TwinBench
from tiny_engines import TinyEngine
from tiny_models import VOCAB_SIZE, build_tiny_model


def test_case_084_runs_come_from_the_tree_not_from_counts() -> None:
    """Catches unrelated contexts taken for siblings because counts happen to be equal."""
    bench = Bench()
    root = bench.create(numbers(1, 32))
    group = [root, *bench.fork(root, 7)]
    alone = [bench.create(numbers(seed, 32)) for seed in range(2, 9)]
    streams = [bench.start(context, 6) for context in (*group, *alone)]
    bench.step()  # samples from kept logits
    bench.step()
    assert max(run.num_rows for run in bench.runner.batches[-1].runs) == 8
    bench.release(*group[1:])
    bench.step()
    batch = bench.runner.batches[-1]
    assert batch.num_rows == 8
    assert {run.num_rows for run in batch.runs} == {1}
    bench.finish(streams[0], *streams[8:])
    bench.end()


def test_case_084_siblings_of_different_lengths_share_one_run() -> None:
    """Catches a merge over the shared run that is wrong for rows of different lengths."""
    made = TinyEngine(build_tiny_model("llama"), num_blocks=64, block_size=16)
    bench = TwinBench(PlainModel.of("llama"), made)
    created = bench.create([(5 * i + 2) % VOCAB_SIZE for i in range(32)])
    bench.run()
    children = bench.fork(created.answer.context.id, count=8)
    for number, child in enumerate(children, start=1):
        bench.extend(child, [(number + i) % VOCAB_SIZE for i in range(number)])
    bench.run()
    assert [len(bench.tokens[child]) for child in children] == list(range(33, 41))
    for child in children:
        bench.generate(child, 4)
    bench.run()  # every token and log-probability is compared with the twin's
    bench.close()
