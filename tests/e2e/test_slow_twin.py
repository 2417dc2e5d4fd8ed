"""Any tree of branches equals plain transformers on each leaf's own tokens: the proof of it all.

Hypothesis draws programs of verbs, steps and cancellations on a pool far too small for what they
hold, so that prefix cache is hit and evicted, idle contexts give way, and requests are preempted
and recomputed. Every token and log-probability that comes out is compared with the twin's.
"""

import random
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import pytest
from bench import PARK
from hypothesis import HealthCheck, currently_in_test_context, given, note, settings
from hypothesis import strategies as st
from slow_twin import TENANT, PlainModel, TwinBench
from tiny_engines import TinyEngine
from tiny_models import PROVEN_FAMILIES, VOCAB_SIZE, build_tiny_model
from transformers import PreTrainedModel

from agentkv.config import SchedulerConfig

BLOCK_SIZE = 4
NUM_BLOCKS = 16
LONGEST = 54
"""Tokens of a context in a program: with what its check adds, it fits when all others give way."""
MOST_CONTEXTS = 12
SHARED = [[(7 * i + 31 * base * i * i + base) % VOCAB_SIZE for i in range(40)] for base in (1, 2)]
"""Two texts that prompts begin with, so that prefixes are found in the cache."""
VERBS = (
    *("create", "fork", "fork", "extend", "extend", "generate", "generate", "generate"),
    *("branches", "branches", "score", "score", "truncate", "release", "cancel", "flush"),
    *("park", "park"),
)


class Action(NamedTuple):
    """One move of a program; what each number means depends on the verb."""

    verb: str
    pick: int
    share: int
    number: int
    tokens: tuple[int, ...]
    num_steps: int


ACTIONS = st.builds(
    Action,
    verb=st.sampled_from(VERBS),
    pick=st.integers(0, MOST_CONTEXTS - 1),
    share=st.integers(0, 40),
    number=st.integers(1, 3),
    tokens=st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=9).map(tuple),
    num_steps=st.integers(0, 6),
)


@cache
def models(family: str) -> tuple[PlainModel, PreTrainedModel]:
    return PlainModel.of(family), build_tiny_model(family)


def act(bench: TwinBench, action: Action) -> None:
    """Does one move and some steps; a move that nothing can make is none."""
    verb, is_full = action.verb, len(bench.tokens) + action.number > MOST_CONTEXTS
    if is_full and verb in {"create", "fork", "branches"}:
        verb = "release"
    if verb == "create" or not bench.tokens:
        prompt = [*SHARED[action.pick % 2][: action.share], *action.tokens]
        bench.create(prompt, logprobs=action.share % 3 == 0)
    elif verb == "flush":
        bench.engine.flush_cache()
    elif verb == "cancel" and bench.pending:
        bench.cancel(bench.pending[action.pick % len(bench.pending)])
    elif verb in {"fork", "branches", "score", "release"}:
        act_on_any(bench, action, verb)
    elif bench.idle:
        act_on_idle(bench, action, verb)
    for _ in range(action.num_steps):
        bench.step()


def act_on_any(bench: TwinBench, action: Action, verb: str) -> None:
    """Verbs that a context takes while it is busy too."""
    tokens, share, number = action.tokens, action.share, action.number
    name = list(bench.tokens)[action.pick % len(bench.tokens)]
    length = len(bench.tokens[name])
    at = max(1, length - share) if share % 2 else None
    if verb == "fork":
        bench.fork(name, count=number, at=max(0, length - share))
    elif verb == "branches" and 0 < length < LONGEST - 5:
        bench.generate_branches(name, number, 1 + share % 5, at=at)
    elif verb == "score" and 0 < length < LONGEST - len(tokens):
        bench.score(name, [tokens, tokens[::-1], tokens[: 1 + share % len(tokens)]][:number])
    else:
        bench.release(name)


def sampling(number: int) -> dict[str, Any]:
    """Options of a generation: greedy, drawn, or drawn with everything that has state."""
    drawn = {"temperature": 1.0, "seed": number}
    penalties = {"repetition_penalty": 1.4, "frequency_penalty": 0.5}
    return [drawn, {}, drawn | penalties | {"penalize_prompt": number % 2 == 0}][number % 3]


def act_on_idle(bench: TwinBench, action: Action, verb: str) -> None:
    """Verbs that change a context."""
    tokens, share = action.tokens, action.share
    name = bench.idle[action.pick % len(bench.idle)]
    length = len(bench.tokens[name])
    if verb == "extend" and length < LONGEST - len(tokens):
        bench.extend(name, tokens, logprobs=share % 2 == 0)
    elif verb == "park":
        bench.engine.contexts.update_lease(TENANT, name, PARK)
    elif verb == "generate" and 0 < length < LONGEST - 8:
        bench.generate(name, 1 + share % 8, **sampling(share))
    elif length:
        bench.truncate(name, max(0, length - 1 - share))


def run_program(
    family: str,
    program: Sequence[Action],
    *,
    max_graph_rows: int | None = None,
    host_blocks: int = 0,
) -> TwinBench:
    """Runs a program to its end, compares every leaf, and gives everything back."""
    plain, model = models(family)
    # Drafts too, where tokens happen to repeat; tests of the engine force them.
    scheduler = SchedulerConfig(token_budget=24, chunk_size=7, num_speculative_tokens=4)
    made = TinyEngine(
        model,
        num_blocks=NUM_BLOCKS,
        block_size=BLOCK_SIZE,
        host_blocks=host_blocks,
        scheduler=scheduler,
        max_graph_rows=max_graph_rows,
    )
    bench = TwinBench(plain, made)
    for action in program:
        if currently_in_test_context():
            note(f"{action}")
        act(bench, action)
    bench.run()
    bench.check_leaves(SHARED[0][3:9])
    bench.close()
    return bench


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2", "gemma3"])
@settings(
    max_examples=30,
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(program=st.lists(ACTIONS, min_size=25, max_size=60))
def test_any_tree_equals_its_twin(family: str, program: Sequence[Action]) -> None:
    """Catches whatever makes a branch differ from the same tokens run alone."""
    run_program(family, program)


@pytest.mark.slow
@settings(
    max_examples=20,
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(program=st.lists(ACTIONS, min_size=25, max_size=60), host_blocks=st.sampled_from([5, 40]))
def test_any_tree_that_moves_equals_its_twin(program: Sequence[Action], host_blocks: int) -> None:
    """Catches KV that comes back from the host as another block's, too early or too late."""
    run_program("llama", program, host_blocks=host_blocks)


def draw(dice: random.Random) -> Action:
    """One move, every choice as likely as any other: bolder than what Hypothesis begins with."""
    return Action(
        verb=dice.choice(VERBS),
        pick=dice.randrange(MOST_CONTEXTS),
        share=dice.randint(0, 40),
        number=dice.randint(1, 3),
        tokens=tuple(dice.randrange(VOCAB_SIZE) for _ in range(dice.randint(1, 9))),
        num_steps=dice.choice((0, 0, 1, 1, 2, 3, 6)),
    )


@pytest.mark.parametrize("family", PROVEN_FAMILIES)
def test_a_tree_of_every_architecture_equals_its_twin(family: str) -> None:
    """Catches an architecture that is right in the golden check alone: few rows, one shape."""
    dice = random.Random(7)
    run_program(family, [draw(dice) for _ in range(16)])


@pytest.mark.slow
@pytest.mark.parametrize("group", range(4))
def test_many_random_trees_equal_their_twins(group: int) -> None:
    """Catches what one program in a hundred shows; a seed names its program."""
    for seed in range(25 * group, 25 * group + 25):
        dice = random.Random(seed)
        program = [draw(dice) for _ in range(dice.randint(20, 60))]
        try:
            run_program("llama", program, host_blocks=dice.choice((0, 6, 40)))
        except BaseException as error:
            error.add_note(f"the program of seed {seed}")
            raise


@pytest.mark.slow
@settings(
    max_examples=10,
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(program=st.lists(ACTIONS, min_size=25, max_size=60))
def test_any_tree_equals_its_twin_with_graphs(program: Sequence[Action]) -> None:
    """Catches a replay of a step of decoding that answers for another step."""
    run_program("llama", program, max_graph_rows=8)
