"""The order of rows, and the runs they read."""

from bench import TENANT, Bench, numbers
from fakes import continuation

from agentkv.core.batch import NO_SLOT, Batch


def assert_well_formed(batch: Batch) -> None:
    """Asserts what a kernel relies on."""
    assert len(batch.token_ids) == len(batch.positions) == len(batch.slots) == batch.num_rows
    for run in batch.runs:
        assert run.first_row >= 0 and run.first_row + run.num_rows <= batch.num_rows
        assert run.num_rows > 0 and run.start < run.end
    assert len({run.segment_id for run in batch.runs}) == len(batch.runs)
    for sample in batch.samples:
        assert (sample.row is None) != (sample.head is None)


def test_branches_of_one_tree_are_neighbours() -> None:
    """Catches rows in order of arrival: the shared run would have to be read once per row."""
    bench = Bench()
    parents = [bench.create(numbers(n, 40)) for n in range(2)]
    groups = [bench.fork(parent, 4) for parent in parents]
    mixed = [child for pair in zip(*groups, strict=True) for child in pair]
    bench.finish(*[bench.start(child, 4) for child in mixed])
    batch = bench.runner.batches[-1]
    assert_well_formed(batch)
    shared = [run for run in batch.runs if run.num_rows > 1]
    assert sorted((run.num_rows, run.start, run.end) for run in shared) == [(4, 0, 32)] * 2
    assert sum(run.num_rows == 1 for run in batch.runs) == 8
    for group, number in zip(groups, range(2), strict=True):
        for child in group:
            assert bench.tokens(child)[40:] == continuation(numbers(number, 40), 4)


def test_chunk_and_decode_in_one_batch() -> None:
    """Catches rows of one request that read another's new tokens."""
    bench = Bench(chunk=8)
    parent = bench.create(numbers(1, 20))
    child, other = bench.fork(parent, 2)
    stream = bench.start(child, 5)
    bench.steps(2)
    bench.engine.contexts.extend(TENANT, other, numbers(2, 20))
    bench.step()
    batch = bench.runner.batches[-1]
    assert_well_formed(batch)
    assert batch.num_rows == 9
    assert sorted(batch.positions) == sorted([21, *range(20, 28)])
    bench.finish(stream)
    bench.drain()
    bench.end()


def test_row_without_a_slot() -> None:
    """Catches a shared block written again by a row that is computed for its logits alone."""
    bench = Bench()
    context = bench.create(numbers(1, 20))
    bench.forget_logits(context)
    bench.generate(context, 1)
    batch = bench.runner.batches[-1]
    assert (batch.positions, batch.slots) == ((19,), (NO_SLOT,))
    assert batch.heads == () and batch.samples[0].row == 0


def test_step_of_kept_logits_has_no_rows() -> None:
    """Catches a row run for a sample whose logits are at hand."""
    bench = Bench()
    context = bench.create(numbers(1, 20))
    stream = bench.start(context, 1)
    bench.step()
    batch = bench.runner.batches[-1]
    assert (batch.num_rows, batch.runs, batch.copies) == (0, (), ())
    assert len(batch.samples) == 1 and batch.samples[0].position == 20
    assert stream.is_done


def test_scores_name_the_row_before_each_token() -> None:
    """Catches a log-probability read one row off, at the first token and between chunks."""
    bench = Bench(chunk=3)
    context = bench.create(numbers(1, 20))
    first = len(bench.runner.batches)
    bench.score(context, [[1, 2, 3, 4, 5]])
    batches = bench.runner.batches[first:]
    assert [[score.token for score in batch.scores] for batch in batches] == [[1, 2, 3, 4], [5]]
    assert [[score.row for score in batch.scores] for batch in batches] == [[None, 0, 1, 2], [0]]
