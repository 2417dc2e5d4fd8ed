"""Cases of the log that need real logits: whatever happened before, it equals the cold run.

A cold run is the same tokens from scratch with the model's own attention. Blocks have 16 tokens;
the model is a tiny random one in fp32, its pool poisoned.
"""

import random
from collections.abc import Callable, Sequence
from functools import cache

import pytest
import torch
from slow_twin import CLEAR_GAP, TENANT, TOLERANCE, PlainModel, TwinBench
from tiny_engines import TinyEngine
from tiny_models import VOCAB_SIZE, build_tiny_model
from torch import Tensor
from transformers import PreTrainedModel

from agentkv.config import SchedulerConfig
from agentkv.core.views import Usage
from agentkv.engine.operations import Generation
from agentkv.engine.outputs import Finish
from agentkv.sampling_params import SamplingParams

BLOCK_SIZE = 16
MAX_LENGTH = 512


@cache
def models() -> tuple[PlainModel, PreTrainedModel]:
    one, other = (build_tiny_model("llama", max_position_embeddings=MAX_LENGTH) for _ in range(2))
    return PlainModel(one), other


def new_bench(*, num_blocks: int = 256, chunk: int = 256, budget: int = 512) -> TwinBench:
    plain, model = models()
    scheduler = SchedulerConfig(token_budget=budget, chunk_size=chunk)
    made = TinyEngine(
        model,
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        scheduler=scheduler,
        max_length=MAX_LENGTH,
    )
    return TwinBench(plain, made)


def prompt_of(seed: int, length: int) -> list[int]:
    generator = random.Random(seed)
    return [generator.randrange(VOCAB_SIZE) for _ in range(length)]


def created(bench: TwinBench, tokens: Sequence[int]) -> tuple[str, Usage]:
    operation = bench.create(tokens)
    bench.run()
    return operation.answer.context.id, operation.answer.usage


def generated(bench: TwinBench, context_id: str, max_tokens: int) -> tuple[list[int], Usage]:
    """Generates, compared with the twin; returns the tokens and what they cost."""
    start = len(bench.tokens[context_id])
    operation = bench.generate(context_id, max_tokens)
    bench.run()
    return bench.tokens[context_id][start:], usage_of(bench, operation)


def usage_of(bench: TwinBench, operation: Generation) -> Usage:
    (finish,) = (update for update in bench.news[operation] if isinstance(update, Finish))
    return finish.usage


def cold(prompt: Sequence[int], count: int) -> tuple[list[int], list[Tensor]]:
    """Generates from scratch; returns the tokens and the logits each was chosen from."""
    plain, tokens, heads = models()[0], list(prompt), []
    for _ in range(count):
        heads.append(plain.logits(tokens)[-1])
        best, second = heads[-1].topk(2).values
        assert best - second > CLEAR_GAP, "a near tie: choose another seed"
        tokens.append(int(heads[-1].argmax()))
    return tokens[len(prompt) :], heads


# -- case 3 --------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("length", [16, 31, 32, 33, 48])
@pytest.mark.parametrize("has_head", [True, False])
def test_case_003_children_decode_from_any_boundary(length: int, has_head: bool) -> None:
    """Catches a fork that leaves nothing to decode from, and a shared block written for logits."""
    bench = new_bench()
    prompt = prompt_of(3, length)
    parent, _ = created(bench, prompt)
    first, second = bench.fork(parent, count=2)
    if not has_head:
        bench.made.drop_heads()
    blocks = bench.made.blocks(TENANT, parent)
    before = bench.made.content(blocks)
    (grandchild,) = bench.fork(second)
    expected, _ = cold(prompt, 1)
    for number, context_id in enumerate((first, parent, grandchild)):
        if not has_head:
            bench.made.drop_heads()
        tokens, usage = generated(bench, context_id, 1)
        assert tokens == expected
        assert usage.computed_tokens == (0 if has_head else 1), f"branch {number}"
        unchanged = bench.made.content(blocks)
        torch.testing.assert_close(unchanged, before, rtol=0, atol=0, equal_nan=True)
    bench.check_leaves(prompt_of(4, 5))
    bench.close()


# -- case 30 -------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [16, 32, 33])
@pytest.mark.parametrize("max_tokens", [1, 5])
def test_case_030_a_prompt_cached_as_a_whole(length: int, max_tokens: int) -> None:
    """Catches a repeat with nothing to run, wrong logits, or a cached block that changes."""
    bench = new_bench()
    prompt = prompt_of(30, length)
    expected, _ = cold(prompt, max_tokens)
    whole = length // BLOCK_SIZE
    contents: list[Tensor] = []
    for turn in range(3):
        context_id, usage = created(bench, prompt)
        if turn:
            assert (usage.cached_tokens, usage.computed_tokens) == (length - 1, 1)
        contents.append(bench.made.content(bench.made.blocks(TENANT, context_id)[:whole]))
        torch.testing.assert_close(contents[-1], contents[0], rtol=0, atol=0)
        assert generated(bench, context_id, max_tokens)[0] == expected
        bench.release(context_id)
    bench.close()


def test_case_030_two_equal_prompts_in_one_cold_batch() -> None:
    """Catches one of them reading what the other is only writing in the same step."""
    bench = new_bench()
    prompt = prompt_of(31, 32)
    operations = [bench.create(prompt) for _ in range(2)]
    bench.run()
    expected, _ = cold(prompt, 5)
    for operation in operations:
        assert operation.answer.usage.computed_tokens == 32
        assert generated(bench, operation.answer.context.id, 5)[0] == expected
    bench.close()


# -- case 33 -------------------------------------------------------------------------------------


@pytest.mark.slow
def test_case_033_repeats_at_every_boundary_are_identical() -> None:
    """Catches output that changes once a repeated prompt crosses a multiple of the block."""
    bench = new_bench()
    prompts = {length: prompt_of(300 + length, length) for length in (15, 16, 17, 31, 32, 33)}
    cached = {15: 0, 16: 15, 17: 16, 31: 16, 32: 31, 33: 32}
    expected = {length: cold(prompt, 40)[0] for length, prompt in prompts.items()}
    for turn in range(3):
        for length, prompt in prompts.items():
            context_id, usage = created(bench, prompt)
            assert usage.cached_tokens == (cached[length] if turn else 0)
            assert generated(bench, context_id, 40)[0] == expected[length]
            bench.release(context_id)
            bench.made.drop_heads()  # with them, a whole prompt is cached and nothing computed
    bench.close()


# -- case 85 -------------------------------------------------------------------------------------

PROMPT = prompt_of(85, 45)


def run_cold(bench: TwinBench) -> str:
    return created(bench, PROMPT)[0]


def run_warm(bench: TwinBench) -> str:
    bench.release(created(bench, PROMPT)[0])
    context_id, usage = created(bench, PROMPT)
    assert usage.cached_tokens == 32
    return context_id


def run_chunked(bench: TwinBench) -> str:
    context_id, _ = created(bench, PROMPT[:1])
    for start in range(1, 45, 7):
        bench.extend(context_id, PROMPT[start : start + 7])
        bench.run()
    return context_id


def run_with_neighbours(count: int) -> Callable[[TwinBench], str]:
    def run(bench: TwinBench) -> str:
        lengths = range(20, 20 + 3 * count, 3)
        neighbours = [created(bench, prompt_of(length, length))[0] for length in lengths]
        for neighbour in neighbours:
            bench.generate(neighbour, 60)
        operation = bench.create(PROMPT)
        while not operation.is_done:
            bench.step()
        assert len(bench.pending) == count
        return operation.answer.context.id

    return run


def run_forked(bench: TwinBench) -> str:
    parent, _ = created(bench, [*PROMPT[:38], *prompt_of(1, 20)])
    (child,) = bench.fork(parent, at=38)
    bench.extend(child, PROMPT[38:])
    bench.run()
    return child


def run_given_way(bench: TwinBench) -> str:
    """All KV of the context is taken for another one, and computed again at its next use."""
    context_id, _ = created(bench, PROMPT)
    full, _ = created(bench, prompt_of(2, 16 * 15))
    view = bench.engine.observer.get(TENANT, context_id)
    assert view.num_computed < len(PROMPT), "nothing gave way"
    bench.release(full)
    return context_id


WAYS: dict[str, tuple[Callable[[TwinBench], str], dict[str, int]]] = {
    "cold": (run_cold, {}),
    "warm": (run_warm, {}),
    "chunks of 1": (run_cold, {"chunk": 1}),
    "chunks of 7": (run_cold, {"chunk": 7}),
    "chunks of 16": (run_cold, {"chunk": 16}),
    "a chunk of 45": (run_cold, {"chunk": 45}),
    "extended by 7": (run_chunked, {}),
    "1 neighbour": (run_with_neighbours(1), {}),
    "2 neighbours": (run_with_neighbours(2), {}),
    "7 neighbours": (run_with_neighbours(7), {}),
    "15 neighbours": (run_with_neighbours(15), {}),
    "forked": (run_forked, {}),
    "given way": (run_given_way, {"num_blocks": 16}),
}


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_case_085_the_way_there_does_not_change_the_output(way: str) -> None:
    """Catches greedy output that depends on cache, chunks, neighbours, forks or pressure."""
    run, sizes = WAYS[way]
    bench = new_bench(**sizes)
    context_id = run(bench)
    tokens, heads = cold(PROMPT, 20)
    head = bench.made.head(TENANT, context_id)
    if head is not None:
        torch.testing.assert_close(head, heads[0], rtol=0, atol=TOLERANCE)
    else:
        assert way == "given way"
    start = len(PROMPT)
    bench.generate(context_id, 20)
    bench.run()
    assert bench.tokens[context_id][start:] == tokens
    bench.close()


@pytest.mark.slow
def test_case_085_preempted_on_the_way() -> None:
    """Catches a request that, sent back to wait and recomputed, goes on differently."""
    bench = new_bench(num_blocks=7)
    older, _ = created(bench, prompt_of(5, 40))
    context_id, _ = created(bench, PROMPT)
    bench.generate(older, 60)  # needs all 7 blocks in the end; PROMPT with 20 more needs 4
    bench.generate(context_id, 20)
    bench.run()
    assert bench.engine.view().num_preemptions > 0
    assert bench.tokens[context_id][len(PROMPT) :] == cold(PROMPT, 20)[0]
    bench.close()


@pytest.mark.slow
def test_case_085_in_bf16_only_near_ties_differ() -> None:
    """Catches corruption that passes for rounding: a token far from the likeliest one."""
    plain = PlainModel(build_tiny_model("llama", dtype=torch.bfloat16))
    made = TinyEngine(build_tiny_model("llama", dtype=torch.bfloat16), block_size=BLOCK_SIZE)
    operation = made.engine.run(made.engine.contexts.create(TENANT, PROMPT))
    (branch,) = made.engine.contexts.fork(TENANT, operation.answer.context.id)
    params = SamplingParams(max_tokens=20)
    made.engine.run(made.engine.inference.generate(TENANT, branch.id, params))
    tokens = made.tokens(TENANT, branch.id)
    logits = plain.logits(tokens)[len(PROMPT) - 1 : -1]
    chosen = logits[torch.arange(20), torch.tensor(tokens[len(PROMPT) :])]
    spread = logits.amax(dim=-1) - logits.amin(dim=-1)
    assert bool(((logits.amax(dim=-1) - chosen) <= 0.02 * spread).all())


# -- case 29 -------------------------------------------------------------------------------------

SHARED = prompt_of(29, 300)
MOST_CONTEXTS = 12


def play(bench: TwinBench, dice: random.Random) -> None:
    """One random move of the traffic that corrupted other systems."""
    move = dice.choice(("create", "fork", "generate", "generate", "truncate", "release", "cancel"))
    idle = bench.idle
    if move == "create" and len(bench.tokens) < MOST_CONTEXTS:
        cut = 16 * dice.randint(1, 18) + dice.choice((-1, 0, 1, dice.randint(2, 14)))
        bench.create([*SHARED[:cut], *prompt_of(dice.randrange(4), dice.randint(1, 20))])
    elif move == "fork" and bench.tokens and len(bench.tokens) < MOST_CONTEXTS:
        parent = dice.choice(list(bench.tokens))
        bench.fork(parent, at=dice.randint(1, len(bench.tokens[parent])))
    elif move == "generate" and idle:
        bench.generate(dice.choice(idle), dice.randint(1, 20))
    elif move == "truncate" and idle:
        context_id = dice.choice(idle)
        bench.truncate(context_id, dice.randint(1, len(bench.tokens[context_id])))
    elif move == "release" and len(bench.tokens) > MOST_CONTEXTS // 2:
        bench.release(dice.choice(list(bench.tokens)))
    elif move == "cancel" and bench.pending:
        operation = dice.choice(bench.pending)
        for _ in range(dice.randint(0, 3)):
            if operation in bench.pending:
                bench.step()
        if operation in bench.pending:
            bench.cancel(operation)
    for _ in range(dice.randint(0, 4)):
        bench.step()


@pytest.mark.slow
@pytest.mark.parametrize("group", range(4))
def test_case_029_fuzzed_traffic_under_eviction(group: int) -> None:
    """Catches outputs corrupted by cancel, evict and shared prefixes; a seed names its program."""
    for seed in range(10 * group, 10 * group + 10):
        bench = new_bench(num_blocks=64, chunk=64, budget=96)
        dice = random.Random(seed)
        fullest = 64
        try:
            for filler in (1, 2):
                created(bench, prompt_of(filler, 350))
            created(bench, SHARED)
            for _ in range(40):
                play(bench, dice)
                fullest = min(fullest, bench.engine.observer.pool().free)
            bench.run()
            bench.close()
        except BaseException as error:
            error.add_note(f"the program of seed {seed}")
            raise
        assert fullest <= 6, f"seed {seed} did not fill nine tenths of the pool"
