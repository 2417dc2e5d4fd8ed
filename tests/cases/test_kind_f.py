"""Cases of kind F, and 110 and 57: what is carried between tiers is exact, whole and given back."""

import random
from pathlib import Path

import pytest
import snapshot_engines
import torch
from bench import PARK, TENANT, Bench, finish_of, numbers, tokens_of
from fakes import continuation
from tiny_engines import TinyEngine
from tiny_models import VOCAB_SIZE, build_tiny_model

from agentkv.core.block_move import Tier
from agentkv.engine.async_engine import AsyncEngine
from agentkv.errors import ContextLost, PoolExhausted, Reason
from agentkv.model.disk_store import DiskStore
from agentkv.sampling_params import SamplingParams


def solo(prompt: list[int], *lengths: int, family: str = "llama") -> list[int]:
    """Generates on an engine with room for everything, nothing moved."""
    made = TinyEngine(build_tiny_model(family), num_blocks=64, block_size=4)
    context = made.engine.run(made.engine.contexts.create(TENANT, prompt)).answer.context.id
    for length in lengths:
        generate(made, context, length)
    return made.tokens(TENANT, context)[len(prompt) :]


def generate(made: TinyEngine, context_id: str, length: int) -> None:
    made.engine.run(
        made.engine.inference.generate(TENANT, context_id, SamplingParams(max_tokens=length))
    )
    made.engine.check()
    made.poison_free()


def park(made: TinyEngine, context_id: str) -> None:
    """Parks, lets the KV leave, and poisons what it left."""
    made.engine.contexts.update_lease(TENANT, context_id, PARK)
    made.engine.step()
    made.engine.check()
    made.poison_free()


def test_case_044_resumed_from_the_host_recomputes_nothing() -> None:
    """Catches a preempted request that comes back as prompt, or computes again what was moved."""
    bench = Bench(num_blocks=8, block_size=4, host_blocks=16)
    prompts = [numbers(1, 3), numbers(2, 3)]
    contexts = [bench.create(prompt) for prompt in prompts]
    before = bench.engine.view().computed_tokens
    streams = [bench.start(context, 24) for context in contexts]
    bench.drain()
    assert bench.engine.view().num_preemptions > 0
    assert bench.engine.view().num_brought_back > 0
    for stream, prompt in zip(streams, prompts, strict=True):
        updates = stream.take_news()
        assert tokens_of(updates) == continuation(prompt, 24)
        assert finish_of(updates).usage.generated_tokens == 24
    # 24 tokens are sampled from 23 rows and the logits that Create kept.
    assert bench.engine.view().computed_tokens - before == 2 * 23
    bench.end()


def test_case_046_parked_right_after_the_step_that_wrote() -> None:
    """Catches a block carried off before its KV was written, in any layer."""
    made = TinyEngine(build_tiny_model("llama"), num_blocks=32, block_size=4, host_blocks=32)
    prompt = [(7 * i + 3) % VOCAB_SIZE for i in range(22)]
    context = made.engine.run(made.engine.contexts.create(TENANT, prompt)).answer.context.id
    for _ in range(5):
        written = made.content(made.blocks(TENANT, context)[:5])  # those that are full
        park(made, context)
        assert made.engine.observer.get(TENANT, context).num_computed == 0
        generate(made, context, 1)
        assert torch.equal(made.content(made.blocks(TENANT, context)[:5]), written)
    assert made.tokens(TENANT, context)[22:] == solo(prompt, *[1] * 5)


def test_case_048_no_context_gets_the_kv_of_another() -> None:
    """Catches blocks of two contexts mixed up on their way between tiers."""
    made = TinyEngine(build_tiny_model("llama"), num_blocks=14, block_size=4, host_blocks=40)
    prompts = [[(20 * n + i) % VOCAB_SIZE for i in range(20)] for n in range(6)]
    contexts = [
        made.engine.run(made.engine.contexts.create(TENANT, prompt)).answer.context.id
        for prompt in prompts
    ]
    for turn in range(18):
        generate(made, contexts[turn % 6], 2)
        view = made.engine.observer.pool()
        assert view.free + view.live + view.cached == view.total
        assert view.host.free + view.host.live + view.host.cached == view.host.total
    assert made.engine.view().num_brought_back > 0
    for context, prompt in zip(contexts, prompts, strict=True):
        assert made.tokens(TENANT, context)[20:] == solo(prompt, 2, 2, 2)


def test_case_049_a_corrupt_host_copy_is_recomputed() -> None:
    """Catches half-written KV that stays readable after a failed check of a later layer."""
    model = build_tiny_model("llama", num_hidden_layers=4)
    made = TinyEngine(model, num_blocks=16, block_size=4, host_blocks=16)
    prompt = [(11 * i + 5) % VOCAB_SIZE for i in range(14)]
    context = made.engine.run(made.engine.contexts.create(TENANT, prompt)).answer.context.id
    made.drop_heads()
    park(made, context)
    rows = made.host._rows
    rows[1, 2 * rows.shape[1] // 4 + 3] ^= 64  # one bit of the third of four layers
    generate(made, context, 4)
    assert made.engine.view().num_lost == 1
    other = [(13 * i + 2) % VOCAB_SIZE for i in range(14)]
    fresh = made.engine.run(made.engine.contexts.create(TENANT, other)).answer.context.id
    generate(made, fresh, 4)
    cold = TinyEngine(model, num_blocks=64, block_size=4)
    for tokens, name in ((prompt, context), (other, fresh)):
        twin = cold.engine.run(cold.engine.contexts.create(TENANT, tokens)).answer.context.id
        generate(cold, twin, 4)
        assert made.tokens(TENANT, name) == cold.tokens(TENANT, twin)


def test_case_049_corrupt_saved_kv_is_recomputed_and_corrupt_tokens_are_refused(
    tmp_path: Path,
) -> None:
    """Catches a rejected snapshot whose KV stays in blocks that somebody else receives."""

    async def save(engine: AsyncEngine) -> None:
        made = await engine.create(TENANT, range(1, 15))
        await engine.save(TENANT, made.context.id, "tree")

    async def cold(engine: AsyncEngine) -> list[int]:
        made = await engine.create(TENANT, range(1, 15))
        return await snapshot_engines.generate(engine, made.context.id, 4)

    async def restore(engine: AsyncEngine) -> list[int]:
        restored = await engine.restore(TENANT, "tree")
        assert restored.num_kv_tokens == 0
        return await snapshot_engines.generate(engine, restored.contexts[0].id, 4)

    async def refuse(engine: AsyncEngine) -> list[int]:
        with pytest.raises(ContextLost) as refused:
            await engine.restore(TENANT, "tree")
        assert refused.value.reason is Reason.SNAPSHOT_CORRUPT
        view = await engine.view()
        assert view.num_contexts == 0 and view.pool.free == view.pool.total
        return await cold(engine)

    snapshot_engines.run(snapshot_engines.tiny(tmp_path), save)
    for name, scenario in (("kv-000000", restore), ("tokens", refuse)):
        (path,) = tmp_path.glob(f"*/*/{name}.safetensors")
        path.write_bytes(path.read_bytes()[:-1] + b"\x55")
        answer = snapshot_engines.run(snapshot_engines.tiny(tmp_path), scenario)
        assert answer == snapshot_engines.run(snapshot_engines.tiny(tmp_path), cold)


@pytest.mark.parametrize("num_blocks", [4, 6])
def test_case_051_bringing_back_counts_the_tokens_to_come(num_blocks: int) -> None:
    """Catches a context brought back into a pool that cannot hold what it is about to write."""
    bench = Bench(num_blocks=num_blocks, block_size=4, host_blocks=4)
    prompt = numbers(1, 12)
    context = bench.create(prompt)
    assert bench.park(context).host_blocks == 3
    if num_blocks == 4:
        with pytest.raises(PoolExhausted) as refusal:
            bench.extend(context, numbers(2, 5))
        metadata = refusal.value.metadata
        assert (metadata["need"], metadata["total"]) == ("5", "4")
        assert bench.view(context).host_blocks == 3 and bench.length(context) == 12
        assert bench.engine.view().num_brought_back == 0
    else:
        answer = bench.extend(context, numbers(2, 5))
        assert answer.usage.computed_tokens == 5
        assert bench.generate(context, 1) == continuation(prompt + numbers(2, 5), 1)
    bench.end()


def test_case_052_cancelled_while_its_kv_is_read() -> None:
    """Catches blocks that a cancelled request, whose KV was on its way, never gives back."""
    bench = Bench(num_blocks=6, block_size=4, host_blocks=2, disk_blocks=8)
    prompt = numbers(1, 16)
    context = bench.create(prompt)
    bench.park(context)
    other = bench.create(numbers(2, 16))
    bench.park(other)
    assert bench.view(context).disk_blocks > 0
    bench.runner.reads_at_once = lambda place: False
    stream = bench.start(context, 4)
    bench.step()
    assert bench.runner.fetching, "nothing was read ahead"
    bench.engine.cancel(stream)
    bench.audit()
    assert bench.tokens(context) == prompt
    bench.runner.reads_at_once = lambda place: True
    bench.step()  # the late completion
    assert bench.generate(context, 4) == continuation(prompt, 4)
    bench.end()


def test_case_052_a_read_that_never_ends(tmp_path: Path) -> None:
    """Catches a request that waits for ever for a disk that does not answer."""
    now = [0.0]
    disk = DiskStore(tmp_path, clock=lambda: now[0], read_timeout=5.0)
    row = torch.arange(64, dtype=torch.uint8)
    disk.write(0, row)
    disk.close()  # nothing reads any more
    disk._writing.clear()
    disk.fetch(0)
    assert disk.fetched(0) == []
    now[0] = 6.0
    assert disk.fetched(0) == [0]
    assert disk.take(0) is None
    assert disk.statistics().num_timeouts == 1


@pytest.mark.parametrize("seed", range(4))
def test_case_053_counts_of_each_tier(seed: int) -> None:
    """Catches a block given back to another tier's pool."""
    dice = random.Random(seed)
    bench = Bench(num_blocks=4, block_size=4, host_blocks=4, disk_blocks=dice.choice((0, 4)))
    paths: dict[str, list[int]] = {}
    for number in range(75):
        verb = dice.choice(("create", "park", "use", "release", "flush"))
        name = dice.choice(list(paths)) if paths else ""
        if verb == "create" and len(paths) < 5:
            tokens = numbers(number, dice.randint(1, 12))
            paths[bench.create(tokens)] = tokens
        elif verb == "park" and name:
            bench.park(name)
        elif verb == "use" and name and len(paths[name]) < 14:
            paths[name] += bench.generate(name, 1)
            assert bench.tokens(name) == paths[name]
        elif verb == "release" and name:
            bench.release(name)
            del paths[name]
        elif verb == "flush":
            bench.engine.flush_cache()
        bench.audit()
        for tier in (Tier.HOST, Tier.DISK):
            view = bench.tree.lower.view(tier)
            assert 0 <= view.free <= view.total
    bench.end()


@pytest.mark.parametrize("host_blocks", [0, 20])
def test_case_057_parked_contexts_do_not_wedge_the_pool(host_blocks: int) -> None:
    """Catches idle contexts in a tool call that keep others out, with and without a host tier."""
    bench = Bench(num_blocks=10, host_blocks=host_blocks)
    prompts = [numbers(number, 48) for number in range(3)]
    idle = [bench.create(prompt) for prompt in prompts]
    for context in idle:
        bench.engine.contexts.update_lease(TENANT, context, PARK)
    newcomer = numbers(5, 64)
    operations = [bench.engine.contexts.create(TENANT, newcomer)]
    bench.step()
    operations += [bench.engine.contexts.extend(TENANT, name, numbers(6, 40)) for name in idle[:2]]
    bench.drain()
    assert [operation.error for operation in operations] == [None] * 3
    computed = bench.engine.view().computed_tokens
    if host_blocks:
        assert computed == 3 * 48 + 64 + 2 * 40, "something was computed twice"
    for name, prompt in zip(idle[:2], prompts, strict=False):
        assert bench.generate(name, 3) == continuation(prompt + numbers(6, 40), 3)
    bench.end()


def test_case_110_no_conversation_in_a_fresh_slot() -> None:
    """Catches a new context that goes on with the KV of one that was parked or is gone."""
    bench = Bench(num_blocks=6, host_blocks=12, max_running=2)
    dice = random.Random(7)
    paths: dict[str, list[int]] = {}
    for turn in range(100):
        if len(paths) == 8:
            bench.release(gone := dice.choice(list(paths)))
            del paths[gone]
        tokens = numbers(turn, 24)
        answer = bench.created(tokens)
        assert answer.usage.computed_tokens + answer.usage.cached_tokens == 24
        assert answer.usage.cached_tokens == 0, "nothing in common with any other"
        paths[answer.context.id] = tokens
        name = dice.choice(list(paths))
        made = bench.generate(name, 2)
        assert made == continuation(paths[name], 2)
        paths[name] = paths[name] + made
        bench.park(name)
    bench.end()
