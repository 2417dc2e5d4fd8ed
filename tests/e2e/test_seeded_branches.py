"""Seeds at the level of the engine: who draws what, whatever else is in the batch."""

from collections.abc import Callable, Sequence
from itertools import combinations

import pytest
from tiny_engines import load_tiny

from agentkv.config import EngineConfig
from agentkv.engine.build import build_engine_for
from agentkv.engine.engine import Engine
from agentkv.engine.operations import Generation
from agentkv.engine.outputs import Chunk, Finish, Update
from agentkv.sampling_params import SamplingParams

TENANT = "tenant"
PROMPT = [(11 * number + 5) % 250 for number in range(20)]
FREE = SamplingParams(max_tokens=16, temperature=1.0, ignore_eos=True)
SEEDED = SamplingParams(max_tokens=16, temperature=1.0, ignore_eos=True, seed=42)


def new_engine() -> Engine:
    """An engine as a server builds it: fresh handles, fresh seeds."""
    return build_engine_for(load_tiny(), EngineConfig(num_blocks=128))


def create(engine: Engine, token_ids: Sequence[int] = PROMPT) -> str:
    return engine.run(engine.contexts.create(TENANT, token_ids)).answer.context.id


def news_of(engine: Engine, *operations: Generation) -> list[list[Update]]:
    for operation in operations:
        engine.run(operation)
    return [list(operation.take_news()) for operation in operations]


def tokens_of(news: Sequence[Update]) -> list[tuple[int, ...]]:
    """The tokens of each branch, in the order of the branches."""
    branches: dict[int, tuple[int, ...]] = {}
    for update in news:
        if isinstance(update, Chunk):
            branches[update.branch] = branches.get(update.branch, ()) + update.token_ids
    return [branches[number] for number in sorted(branches)]


def seeds_of(news: Sequence[Update]) -> set[int | None]:
    return {update.seed for update in news if isinstance(update, Finish)}


@pytest.mark.slow
def test_case_061_one_seed_gives_each_branch_its_own_stream() -> None:
    """Catches a seed copied to all samples, and a branch that depends on which call made it."""
    engine = new_engine()
    parent = create(engine)
    runs = [
        tokens_of(news_of(engine, engine.inference.generate_branches(TENANT, parent, 4, SEEDED))[0])
        for _ in range(2)
    ]
    assert all(one != other for one, other in combinations(runs[0], 2))
    assert runs[0] == runs[1]
    children = engine.contexts.fork(TENANT, parent, count=4)
    generations = [engine.inference.generate(TENANT, child.id, SEEDED) for child in children]
    assert [tokens_of(news)[0] for news in news_of(engine, *generations)] == runs[0]


def with_seeded(engine: Engine, context_id: str) -> None:
    engine.inference.generate(
        TENANT, context_id, SamplingParams(max_tokens=30, temperature=1.0, seed=7)
    )


def with_unseeded(engine: Engine, context_id: str) -> None:
    engine.inference.generate(TENANT, context_id, SamplingParams(max_tokens=30, temperature=1.0))


def with_greedy(engine: Engine, context_id: str) -> None:
    engine.inference.generate(TENANT, context_id, SamplingParams(max_tokens=30))


def with_top_k(engine: Engine, context_id: str) -> None:
    params = SamplingParams(max_tokens=30, temperature=1.0, top_k=1)
    engine.inference.generate(TENANT, context_id, params)


def with_cancelled(engine: Engine, context_id: str) -> None:
    operation = engine.inference.generate(TENANT, context_id, FREE)
    for _ in range(3):
        engine.step()
    engine.cancel(operation)
    engine.contexts.truncate(TENANT, context_id, len(PROMPT) + 1)


NEIGHBOURS: dict[str, Callable[[Engine, str], None]] = {
    "seeded": with_seeded,
    "unseeded": with_unseeded,
    "greedy": with_greedy,
    "top-k 1": with_top_k,
    "cancelled": with_cancelled,
}


@pytest.mark.slow
def test_case_062_a_seed_holds_whatever_the_neighbours_do() -> None:
    """Catches draws that depend on who else is in the batch."""
    params = SamplingParams(max_tokens=16, temperature=0.8, seed=42, ignore_eos=True)
    engine = new_engine()
    (alone,) = tokens_of(
        news_of(engine, engine.inference.generate(TENANT, create(engine), params))[0]
    )
    for name, begin in NEIGHBOURS.items():
        engine = new_engine()
        neighbour, context_id = create(engine, [*PROMPT, 9]), create(engine)
        if name == "cancelled":  # at its third step, while the other one runs
            operation = engine.inference.generate(TENANT, context_id, params)
            begin(engine, neighbour)
        else:
            begin(engine, neighbour)
            operation = engine.inference.generate(TENANT, context_id, params)
        assert tokens_of(news_of(engine, operation)[0]) == [alone], f"neighbour: {name}"


@pytest.mark.slow
def test_case_064_without_a_seed_every_draw_is_new_and_can_be_replayed() -> None:
    """Catches a constant default seed, process-wide state, and a seed that is not reported."""
    seen: list[tuple[int, ...]] = []
    for _ in range(2):  # the second is the server after a restart
        engine = new_engine()
        parent = create(engine)
        children = engine.contexts.fork(TENANT, parent, count=8)
        generations = [engine.inference.generate(TENANT, child.id, FREE) for child in children]
        for news in news_of(engine, *generations):
            seen += tokens_of(news)
        (news,) = news_of(engine, engine.inference.generate_branches(TENANT, parent, 8, FREE))
        seen += tokens_of(news)
        (seed,) = seeds_of(news)
        assert seed is not None
        replayed = SamplingParams(max_tokens=16, temperature=1.0, ignore_eos=True, seed=seed)
        (again,) = news_of(engine, engine.inference.generate_branches(TENANT, parent, 8, replayed))
        assert tokens_of(again) == tokens_of(news)
    assert len(set(seen)) == 32


def test_greedy_reports_no_seed() -> None:
    """Catches a seed that a caller would believe to matter."""
    engine = new_engine()
    greedy = SamplingParams(max_tokens=2, seed=5)
    (news,) = news_of(engine, engine.inference.generate(TENANT, create(engine), greedy))
    assert seeds_of(news) == {None}
