"""Cases of kind C: what the prefix cache shows is there, written, and of these very tokens."""

import pytest
from bench import TENANT, Bench, numbers
from fakes import Kv, continuation
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from agentkv.core.batch import Batch
from agentkv.core.eviction import evict
from agentkv.errors import PoolExhausted, Reason
from agentkv.sampling_params import SamplingParams


def raise_in_step(bench: Bench, number: int) -> None:
    """Lets the `number`-th step from now raise before it computes anything."""
    first = len(bench.runner.batches)

    def before_step(_: Batch) -> None:
        if len(bench.runner.batches) == first + number:
            raise RuntimeError("the device failed")

    bench.runner.before_step = before_step


@pytest.mark.parametrize("cause", ["cancel", "failure"])
def test_case_019_advertised_before_written(cause: str) -> None:
    """Catches blocks that can be matched although the step that fills them never ran."""
    bench = Bench(chunk=32)
    prompt = numbers(1, 96)
    if cause == "failure":
        raise_in_step(bench, 2)
    operation = bench.engine.contexts.create(TENANT, prompt)
    bench.step()
    if cause == "cancel":
        bench.engine.cancel(operation)
    else:
        bench.step()
        assert operation.error is not None
        assert operation.error.reason is Reason.ENGINE_STEP_FAILED
    bench.audit()  # poisons what is free
    answer = bench.created(prompt)
    assert answer.usage.cached_tokens <= 32
    assert bench.generate(answer.context.id, 4) == continuation(prompt, 4)
    bench.end()


def test_case_020_reserved_for_a_batch_that_never_ran() -> None:
    """Catches blocks that stay matchable after their step was dropped.

    A plan is never dropped here but by a step that raises; its requests end, and are sent again.
    """
    bench = Bench(budget=64)
    decoding = [bench.create(numbers(2 + n, 20)) for n in range(4)]
    streams = [bench.start(context, 6) for context in decoding]
    bench.step()
    prompt = numbers(9, 48)
    dropped = bench.engine.contexts.create(TENANT, prompt)
    raise_in_step(bench, 1)
    bench.step()
    assert dropped.error is not None
    assert bench.pool_view.cached == 0
    answer = bench.created(prompt)
    assert answer.usage.cached_tokens == 0
    assert bench.generate(answer.context.id, 4) == continuation(prompt, 4)
    assert all(stream.is_done for stream in streams)
    bench.end()


def test_case_021_evicted_block_still_reachable() -> None:
    """Catches an index that still names blocks given to somebody else."""
    bench = Bench(num_blocks=4)
    x, y_tokens = numbers(3, 32), numbers(4, 64)
    bench.release(bench.create(x))
    assert bench.pool_view.cached == 2
    y = bench.create(y_tokens, pinned=True)
    assert bench.free == 0
    with pytest.raises(PoolExhausted):
        bench.create(x)
    assert bench.generate(y, 1) == continuation(y_tokens, 1)
    bench.release(y)
    answer = bench.created(x)
    assert answer.usage.cached_tokens == 0
    assert bench.generate(answer.context.id, 3) == continuation(x, 3)
    bench.end()


@pytest.mark.parametrize(("num_evicted", "hit"), [(1, 32), (2, 16), (3, 0)])
def test_case_023_hole_in_the_middle(num_evicted: int, hit: int) -> None:
    """Catches a hit counted past what was evicted: eviction goes from the end of a run."""
    bench = Bench(num_blocks=8)
    prompt = numbers(5, 49)
    bench.release(bench.create(prompt[:48]))
    assert evict(bench.tree, bench.free + num_evicted)
    answer = bench.created(prompt)
    assert answer.usage.cached_tokens == hit
    assert bench.generate(answer.context.id, 3) == continuation(prompt, 3)
    bench.end()


def test_case_023_no_hole_can_arise() -> None:
    """Catches eviction of a block while blocks below it on the path are kept."""
    bench = Bench(num_blocks=8)
    context = bench.create(numbers(5, 32))
    (child,) = bench.fork(context)
    bench.extend(context, numbers(6, 16))
    bench.extend(child, numbers(7, 16))
    upper = bench.tree.path(bench.engine._store.get(TENANT, context).tail)[0]
    with pytest.raises(AssertionError):
        bench.tree.strip(upper, 16)
    bench.end()


def test_case_024_work_size_computed_before_the_hit() -> None:
    """Catches rows planned for tokens that the cache has."""
    bench = Bench(budget=64, chunk=64)
    prompt, fresh = numbers(8, 29), numbers(9, 50)
    bench.release(bench.create(prompt))
    hit = bench.created(prompt)
    assert (hit.usage.cached_tokens, hit.usage.computed_tokens) == (16, 13)
    assert bench.runner.batches[-1].positions == tuple(range(16, 29))
    bench.release(hit.context.id)

    operations = [bench.engine.contexts.create(TENANT, tokens) for tokens in (prompt, fresh)]
    bench.step()
    assert all(operation.is_done for operation in operations)
    assert bench.runner.batches[-1].num_rows == 13 + 50
    for operation, tokens in zip(operations, (prompt, fresh), strict=True):
        assert bench.generate(operation.answer.context.id, 3) == continuation(tokens, 3)
    bench.end()


@pytest.mark.parametrize("num_others", [0, 6])
@pytest.mark.parametrize("is_fork", [True, False])
def test_case_025_trim_moves_only_the_offset(is_fork: bool, num_others: int) -> None:
    """Catches a reader that sees more of a shared run than its own length."""
    bench = Bench()
    a_tokens, new = numbers(10, 40), numbers(11, 10)
    n_tokens = a_tokens[:25] + new
    a = bench.create(a_tokens)
    others = [bench.create(numbers(20 + number, 20)) for number in range(num_others)]
    streams = [bench.start(other, 8) for other in others]
    if is_fork:
        (n,) = bench.fork(a, at=25)
        bench.extend(n, new)
        assert [copy.num_tokens for copy in bench.runner.batches[-1].copies] == [9]
    else:
        answer = bench.created(n_tokens)
        assert answer.usage.cached_tokens == 16
        n = answer.context.id
    a_blocks = bench.blocks(a)
    slots = [a_blocks[position // 16] * 16 + position % 16 for position in range(25, 40)]
    before = [bench.runner.slots[slot] for slot in slots]
    for slot in slots:
        bench.runner.slots[slot] = Kv(-1, -1, -1)

    # Without the bench's audit, which would see the poison.
    stream = bench.engine.inference.generate(TENANT, n, SamplingParams(max_tokens=6))
    bench.engine.run(stream)

    for slot, kv in zip(slots, before, strict=True):
        bench.runner.slots[slot] = kv
    assert bench.tokens(n) == n_tokens + continuation(n_tokens, 6)
    bench.finish(*streams)
    assert bench.generate(a, 6) == continuation(a_tokens, 6)
    bench.end()


def test_case_025_trim_of_a_released_context() -> None:
    """Catches a cached run, longer than what is shared, read to its end."""
    bench = Bench()
    a_tokens, new = numbers(10, 40), numbers(11, 10)
    n_tokens = a_tokens[:25] + new
    a = bench.create(a_tokens)
    (n,) = bench.fork(a, at=25)
    bench.release(a)
    bench.extend(n, new)
    assert bench.generate(n, 6) == continuation(n_tokens, 6)
    bench.release(n)
    answer = bench.created([*a_tokens[:25], 7])
    assert answer.usage.cached_tokens == 16
    assert bench.generate(answer.context.id, 6) == continuation([*a_tokens[:25], 7], 6)
    bench.end()


def test_case_027_duplicates_freed_under_a_request() -> None:
    """Catches equal runs merged behind the back of a request that still reads its own."""
    bench = Bench(num_blocks=16)
    prompt = numbers(12, 48)
    operations = [bench.engine.contexts.create(TENANT, prompt) for _ in range(2)]
    bench.drain()
    contexts = [operation.answer.context.id for operation in operations]
    bench.create(numbers(13, 80), pinned=True)
    bench.finish(*[bench.start(context, 20) for context in contexts])
    for context in contexts:
        assert bench.tokens(context) == prompt + continuation(prompt, 20)
    assert bench.live == 15, "equal runs are not merged"
    bench.end()


VERBS = ["create", "fork", "truncate", "cancel", "release", "generate", "generate"]
actions = st.tuples(
    st.sampled_from(VERBS), st.integers(0, 11), st.integers(0, 18), st.integers(1, 20)
)


@pytest.mark.slow
@settings(
    max_examples=200,
    deadline=None,
    derandomize=True,
    phases=(Phase.generate, Phase.shrink),
    suppress_health_check=list(HealthCheck),
)
@given(program=st.lists(actions, min_size=6, max_size=10))
def test_case_029_fuzzed_traffic_over_a_shared_prefix(
    program: list[tuple[str, int, int, int]],
) -> None:
    """Catches any divergence under cancel, eviction and shared prefixes, in a pool that is full.

    The prefix is cut at 16k - 1, 16k and 16k + 1. A failing program is printed shrunk.
    """
    bench = Bench(num_blocks=64)
    prefix = numbers(14, 300)
    model = {bench.create(prefix + numbers(40 + n, 100)): n for n in range(2)}
    tokens = {context: bench.tokens(context) for context in model}
    bench.create(numbers(50, 16 * 20), pinned=True)
    cuts = [min(300, 16 * k + d) for k in (1, 4, 9, 14, 17, 18) for d in (-1, 0, 1)]

    for verb, pick, cut, count in program:
        contexts = list(tokens)
        context = contexts[pick % len(contexts)] if contexts else None
        length = cuts[cut % len(cuts)]
        if verb == "create" or context is None:
            if len(tokens) < 12:
                prompt = prefix[:length] + numbers(60 + pick, count)
                tokens[bench.create(prompt)] = prompt
        elif verb == "fork":
            at = min(length, len(tokens[context]))
            (child,) = bench.fork(context, at=at)
            tokens[child] = tokens[context][:at]
        elif verb == "truncate":
            cut_to = min(length, len(tokens[context]))
            bench.truncate(context, cut_to)
            del tokens[context][cut_to:]
        elif verb == "release":
            bench.release(context)
            del tokens[context]
        else:
            stream = bench.start(context, count)
            if verb == "cancel":
                bench.steps(pick % 4)
                bench.engine.cancel(stream)
                generated = bench.tokens(context)[len(tokens[context]) :]
                assert generated == continuation(tokens[context], len(generated))
            else:
                bench.engine.run(stream)  # the audit comes once per verb, not once per step
                generated = continuation(tokens[context], count)
            tokens[context] += generated
        bench.audit()
        assert all(bench.tokens(name) == expected for name, expected in tokens.items())
    bench.end()
