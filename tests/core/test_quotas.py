"""Quotas of tenants: refusals that name numbers, change nothing and hurt nobody else."""

import pytest
from bench import TENANT, Bench, finish_of, numbers, tokens_of
from fakes import continuation

from agentkv.config import QuotaConfig, QuotasConfig
from agentkv.core.request import FinishReason
from agentkv.errors import InvalidRequest, PoolExhausted, Reason
from agentkv.sampling_params import SamplingParams


def bench_with(num_blocks: int = 64, block_size: int = 4, **quota: float) -> Bench:
    """A bench whose tenant has a quota, and every other tenant none."""
    given: dict[str, object] = dict(quota)
    mine = QuotaConfig(**given)  # type: ignore[arg-type]  # numbers by name
    return Bench(num_blocks, block_size, quotas=QuotasConfig(tenants={TENANT: mine}))


def refusal_of(error: pytest.ExceptionInfo[PoolExhausted], quota: str) -> PoolExhausted:
    """Checks that a quota refused, and that its numbers are there."""
    refusal = error.value
    assert refusal.reason is Reason.TENANT_QUOTA
    assert refusal.metadata["quota"] == quota
    assert refusal.metadata.keys() >= {"need", "free", "reclaimable", "limit", "held"}
    return refusal


def test_contexts_and_depth_and_fan_out() -> None:
    """Catches a limit that is not looked at, or counts what was released."""
    bench = bench_with(contexts=6, depth=2, fan_out=3)
    root = bench.create(numbers(1, 5))
    children = bench.fork(root, 3)
    with pytest.raises(PoolExhausted) as error:
        bench.fork(root)
    refusal = refusal_of(error, "fan_out")
    assert (refusal.metadata["limit"], refusal.metadata["held"]) == ("3", "3")
    assert refusal.retry_after is None
    bench.release(children[0])
    (grandchild,) = bench.fork(children[1])
    with pytest.raises(PoolExhausted) as error:
        bench.fork(grandchild)
    refusal_of(error, "depth")
    bench.fork(root)
    with pytest.raises(PoolExhausted) as error:
        bench.fork(children[1], 2)
    assert refusal_of(error, "contexts").metadata["free"] == "1"
    assert len(bench.engine.observer.list(TENANT).contexts) == 5
    bench.end()


def test_a_path_that_would_be_held_again_counts_as_needed() -> None:
    """Catches a refusal of "0 more blocks": cached KV of a context beside pins at the quota."""
    bench = bench_with(block_size=1, blocks=4)
    pinned = bench.create(numbers(1, 2), pinned=True)
    idle = bench.create(numbers(2, 2))
    bench.extend(pinned, numbers(3, 2))  # the other gives way, and its KV stays as cache
    with pytest.raises(PoolExhausted) as error:
        bench.generate(idle, 1)
    metadata = refusal_of(error, "blocks").metadata
    need, free, reclaimable = (float(metadata[name]) for name in ("need", "free", "reclaimable"))
    assert need > free + reclaimable
    bench.end()


def test_no_rows_are_kept_for_who_waits_for_its_quota() -> None:
    """Catches a step without rows: all kept for a request that its tenant's quota keeps waiting."""
    mine = QuotaConfig(blocks=4)
    bench = Bench(6, 4, budget=4, quotas=QuotasConfig(tenants={TENANT: mine}))
    idle = bench.create(numbers(1, 5))
    bench.create(numbers(2, 7))
    begun = bench.engine.contexts.create(TENANT, numbers(3, 6))
    waiting = bench.engine.contexts.extend(TENANT, idle, numbers(4, 4))
    bench.run(begun)
    bench.run(waiting)
    bench.end()


def test_blocks_make_only_the_tenants_own_idle_contexts_give_way() -> None:
    """Catches a tenant at its quota that pushes out others, or that is refused too early."""
    bench = bench_with(blocks=6)
    stranger = bench.run(bench.engine.contexts.create("other", numbers(9, 40))).answer.context
    first = bench.create(numbers(1, 16))
    second = bench.create(numbers(2, 16))
    assert bench.pool_view.cached == 4, "what gave way is cache, and costs nobody anything"
    assert bench.engine.observer.usage(TENANT).quotas.blocks == 4
    assert bench.engine.observer.usage("other").quotas.blocks == 10
    assert bench.engine.observer.get("other", stranger.id).num_computed == 40
    assert bench.generate(second, 3) == continuation(numbers(2, 16), 3)
    assert bench.generate(first, 3) == continuation(numbers(1, 16), 3)


def test_a_prompt_over_the_quota_is_refused_whole() -> None:
    """Catches a refusal that leaves a context, blocks, or a bill behind."""
    bench = bench_with(blocks=3)
    bench.create(numbers(1, 8), pinned=True)
    with pytest.raises(PoolExhausted) as error:
        bench.create(numbers(2, 9))
    refusal = refusal_of(error, "blocks")
    assert (refusal.metadata["need"], refusal.metadata["free"]) == ("3", "1")
    assert refusal.metadata["reclaimable"] == "0"
    assert refusal.retry_after == 1.0
    with pytest.raises(PoolExhausted) as error:
        bench.create(numbers(2, 13))
    assert refusal_of(error, "blocks").retry_after is None, "waiting cannot help"
    assert bench.engine.view().num_contexts == 1
    bench.run(bench.engine.contexts.create("other", numbers(2, 13)))


def test_a_generation_that_reaches_the_quota_keeps_what_it_committed() -> None:
    """Catches tokens lost, or a stream that hangs, at the quota."""
    bench = bench_with(blocks=3)
    prompt = numbers(1, 8)
    context = bench.create(prompt, pinned=True)
    updates = bench.finish(bench.start(context, 20))
    end = finish_of(updates)
    assert end.reason is FinishReason.ERROR
    assert isinstance(end.error, PoolExhausted)
    assert end.error.metadata["quota"] == "blocks"
    assert tokens_of(updates) == continuation(prompt, 5)
    assert bench.tokens(context) == prompt + continuation(prompt, 5)
    bench.end()


def test_siblings_within_one_quota_take_turns() -> None:
    """Catches a deadlock among one tenant's own requests, which the pool has room for."""
    bench = bench_with(blocks=8)
    prompts = [numbers(seed, 8) for seed in range(4)]
    contexts = [bench.create(prompt) for prompt in prompts]
    bench.finish(*[bench.start(context, 14) for context in contexts])
    for context, prompt in zip(contexts, prompts, strict=True):
        assert bench.tokens(context) == prompt + continuation(prompt, 14)
    bench.end()


def test_a_tenant_that_waits_for_its_quota_keeps_nobody_waiting() -> None:
    """Catches a queue whose head waits for its own tenant, and with it everybody else."""
    bench = bench_with(blocks=4)
    busy = bench.create(numbers(1, 8))
    stream = bench.start(busy, 6)
    bench.steps(2)
    waiting = bench.engine.contexts.create(TENANT, numbers(2, 12))
    other = bench.engine.contexts.create("other", numbers(3, 8))
    bench.step()
    assert other.is_done and not waiting.is_done
    bench.finish(stream)
    bench.run(waiting)


def test_block_seconds_refuse_until_the_window_frees_enough() -> None:
    """Catches use that never expires, a wrong hint, and a refusal of what takes no block."""
    bench = bench_with(block_seconds=100.0, window=60.0)
    context = bench.create(numbers(1, 8))
    bench.now += 49.0
    other = bench.create(numbers(2, 4))
    bench.now += 5.0
    with pytest.raises(PoolExhausted) as error:
        bench.extend(context, numbers(3, 8))
    refusal = refusal_of(error, "block_seconds")
    assert float(refusal.metadata["held"]) == pytest.approx(2 * 49.0 + 3 * 5.0)
    assert refusal.retry_after is None, "what is held uses it up as fast as it frees"
    assert bench.length(context) == 8
    (branch,) = bench.fork(context)
    bench.release(context, branch, other)
    with pytest.raises(PoolExhausted) as error:
        bench.create(numbers(4, 4))
    wait = refusal_of(error, "block_seconds").retry_after
    assert wait is not None
    assert 0 < wait < 60
    bench.now += wait
    bench.create(numbers(4, 4))
    bench.end()


def test_block_seconds_end_a_generation() -> None:
    """Catches a long generation that is never looked at again once it runs."""
    bench = bench_with(block_seconds=10.0, window=60.0)
    prompt = numbers(1, 4)
    context = bench.create(prompt)
    stream = bench.start(context, 40)
    bench.steps(2)
    bench.now += 20.0
    updates = bench.finish(stream)
    end = finish_of(updates)
    assert isinstance(end.error, PoolExhausted)
    assert end.error.metadata["quota"] == "block_seconds"
    made = tokens_of(updates)
    assert made == continuation(prompt, len(made))
    assert bench.tokens(context) == prompt + made
    bench.end()


def test_one_of_many_branches_may_fail_alone() -> None:
    """Catches a quota that ends a whole group for one of its branches."""
    bench = bench_with(blocks=6)
    root = bench.create(numbers(1, 8), pinned=True)
    params = SamplingParams(max_tokens=9)
    updates = bench.finish(bench.engine.inference.generate_branches(TENANT, root, 3, params))
    errors = [finish_of(updates, branch).error for branch in range(3)]
    assert any(errors)
    assert not all(errors)
    for branch in range(3):
        made = tokens_of(updates, branch)
        assert made == continuation(numbers(1, 8), len(made))
    bench.end()


def test_quotas_are_read_from_toml() -> None:
    """Catches a tenant that loses the defaults it does not name."""
    quotas = QuotasConfig.read(
        """
        [default]
        blocks = 100
        window = 60
        [tenants.alice]
        blocks = 200
        block_seconds = 1e4
        """
    )
    assert quotas.of("bob") == QuotaConfig(blocks=100, window=60)
    assert quotas.of("alice") == QuotaConfig(blocks=200, block_seconds=1e4, window=60)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("blocks = ", "no TOML"),
        ("[defaults]\nblocks = 1", "no table defaults"),
        ("[default]\nblock = 1", "know no block"),
        ("[default]\nblocks = -1", "not negative"),
        ("[default]\nblocks = 1.5", "whole number"),
        ("[default]\nblocks = true", "must be a number"),
        ("[default]\nblock_seconds = nan", "must be a number"),
        ("[default]\nwindow = 0", "above 0"),
        ("tenants = 3", "table of tables"),
        ("[tenants]\nalice = 3", "must be a table"),
    ],
)
def test_wrong_quotas_are_refused(text: str, said: str) -> None:
    """Catches a misspelt limit that silently is none."""
    with pytest.raises(InvalidRequest, match=said):
        QuotasConfig.read(text)
