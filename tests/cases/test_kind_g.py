"""Cases of kinds F and G that need no host tier: progress under pressure, and its numbers."""

import pytest
from bench import TENANT, Bench, finish_of, numbers, tokens_of
from fakes import continuation

from agentkv.core.lease import LeaseMode, LeaseTerms
from agentkv.core.request import FinishReason
from agentkv.errors import PoolExhausted, Reason


def test_case_044_resumed_sequence_doubles_no_token() -> None:
    """Catches generated tokens taken for prompt, or added twice, by a resume that recomputes."""
    bench = Bench(num_blocks=8, block_size=4)
    prompts = [numbers(1, 3), numbers(2, 3)]
    contexts = [bench.create(prompt) for prompt in prompts]
    streams = [bench.start(context, 24) for context in contexts]
    bench.drain()
    assert bench.engine.view().num_preemptions > 0
    for stream, prompt, context in zip(streams, prompts, contexts, strict=True):
        updates = stream.take_news()
        assert tokens_of(updates) == continuation(prompt, 24)
        assert finish_of(updates).usage.generated_tokens == 24
        assert bench.length(context) == 27
    bench.end()


def test_case_054_holder_of_blocks_behind_one_that_has_none() -> None:
    """Catches a stall: who waits in front needs the blocks of who waits behind."""
    bench = Bench(num_blocks=8)
    d_tokens, a_tokens = numbers(1, 62), numbers(2, 80)
    d = bench.create(d_tokens)
    create = bench.engine.contexts.create(TENANT, a_tokens)
    stream = bench.start(d, 20)
    for _ in range(200):
        if not bench.engine.has_work:
            break
        bench.step()
    assert bench.tokens(d) == d_tokens + continuation(d_tokens, 20)
    assert stream.error is None
    assert bench.generate(create.answer.context.id, 1) == continuation(a_tokens, 1)
    bench.end()


def test_case_055_preemption_ping_pong() -> None:
    """Catches two requests that push each other out without end."""
    bench = Bench(num_blocks=6, block_size=4)
    prompts = [numbers(1, 12), numbers(2, 12)]
    contexts = [bench.create(prompt) for prompt in prompts]
    bench.finish(*[bench.start(context, 8) for context in contexts])
    assert bench.engine.view().num_preemptions <= 2
    for context, prompt in zip(contexts, prompts, strict=True):
        assert bench.tokens(context) == prompt + continuation(prompt, 8)
    bench.end()


class TestCase056RequestThatCanNeverFit:
    """B=16, P=5: each with a small request behind it, which must complete."""

    def test_case_056_prompt_that_is_too_long(self) -> None:
        """Catches a request that waits for ever instead of being refused at once."""
        bench = Bench(num_blocks=5)
        with pytest.raises(PoolExhausted) as refusal:
            bench.engine.contexts.create(TENANT, numbers(1, 81))
        metadata = refusal.value.metadata
        assert (metadata["need"], metadata["total"]) == ("6", "5")
        assert refusal.value.retry_after is None
        self.small_request(bench)

    def test_case_056_prompt_that_just_fits(self) -> None:
        """Catches a block counted for a sampled token that is never written."""
        bench = Bench(num_blocks=5)
        prompt = numbers(1, 80)
        context = bench.create(prompt)
        assert bench.generate(context, 1) == continuation(prompt, 1)
        bench.release(context)
        self.small_request(bench)

    def test_case_056_generation_that_reaches_the_wall(self) -> None:
        """Catches committed tokens lost, or a wait without end, at the wall."""
        bench = Bench(num_blocks=5)
        prompt = numbers(1, 60)
        context = bench.create(prompt)
        stream = bench.start(context, 30)
        behind = bench.engine.contexts.create(TENANT, numbers(9, 10))
        updates = bench.finish(stream)
        finish = finish_of(updates)
        assert tokens_of(updates) == continuation(prompt, 21)
        assert finish.reason is FinishReason.ERROR
        assert finish.error is not None and finish.error.reason is Reason.KV_BLOCKS_EXHAUSTED
        assert bench.length(context) == 81
        bench.run(behind)
        bench.end()

    def test_case_056_with_a_watermark(self) -> None:
        """Catches a limit that ignores the blocks which are kept back."""
        bench = Bench(num_blocks=5, watermark=1)
        with pytest.raises(PoolExhausted) as refusal:
            bench.engine.contexts.create(TENANT, numbers(1, 65))
        assert refusal.value.metadata["need"] == "5"
        assert refusal.value.retry_after is None
        bench.create(numbers(1, 64))
        self.small_request(bench)

    def small_request(self, bench: Bench) -> None:
        prompt = numbers(9, 10)
        assert bench.generate(bench.create(prompt), 3) == continuation(prompt, 3)
        bench.end()


@pytest.mark.parametrize("mode", list(LeaseMode))
def test_case_057_idle_contexts_wedge_the_pool(mode: LeaseMode) -> None:
    """Catches idle contexts that hold what a running one must have, and a hang where pins do."""
    bench = Bench(num_blocks=10)
    prompts = [numbers(number, 48) for number in range(3)]
    idle = [bench.create(prompt) for prompt in prompts]
    for context in idle:
        bench.engine.contexts.update_lease(TENANT, context, LeaseTerms(mode))
    newcomer = numbers(5, 64)
    if mode is LeaseMode.PIN:
        with pytest.raises(PoolExhausted) as refusal:
            bench.create(newcomer)
        metadata = refusal.value.metadata
        assert [metadata[name] for name in ("need", "free", "reclaimable")] == ["4", "1", "0"]
        with pytest.raises(PoolExhausted):
            bench.extend(idle[0], numbers(6, 40))
        assert bench.length(idle[0]) == 48
    else:
        operations = [bench.engine.contexts.create(TENANT, newcomer)]
        bench.step()
        operations += [
            bench.engine.contexts.extend(TENANT, name, numbers(6, 40)) for name in idle[:2]
        ]
        bench.drain()
        assert [operation.error for operation in operations] == [None] * 3
        for name, prompt in zip(idle[:2], prompts, strict=False):
            path = prompt + numbers(6, 40)
            assert bench.generate(name, 3) == continuation(path, 3)
        context = operations[0].answer.context.id
        assert bench.generate(context, 3) == continuation(newcomer, 3)
    assert bench.generate(idle[2], 1) == continuation(prompts[2], 1)
    bench.end()


def test_case_058_prefill_always_wins() -> None:
    """Catches prompts that take the whole budget of a step from a running branch."""
    bench = Bench(chunk=32, budget=64)
    context = bench.create(numbers(1, 20))
    stream = bench.start(context, 50)
    prompts = []
    for number in range(20):
        prompts.append(bench.engine.contexts.create(TENANT, numbers(100 + number, 256)))
        before = bench.length(context)
        bench.step()
        assert bench.length(context) == before + 1
    bench.finish(stream)
    bench.drain()
    assert all(prompt.is_done and prompt.error is None for prompt in prompts)
    assert all(batch.num_rows <= 64 for batch in bench.runner.batches)
    bench.end()
