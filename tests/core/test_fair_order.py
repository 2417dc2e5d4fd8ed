"""Who is served next, over tenants and trees."""

import random

from bench import TENANT, Bench, finish_of, numbers
from fakes import continuation

from agentkv.core.fair_order import FairClock
from agentkv.core.lease import DEFAULT_TERMS
from agentkv.engine.operations import Generation
from agentkv.sampling_params import SamplingParams


def serve_least(clock: FairClock, flows: list[str], num_turns: int) -> list[str]:
    """Serves one token at a time to whose turn it is."""
    served = []
    for _ in range(num_turns):
        flow = min(flows, key=lambda name: (clock.tag(name), name))
        clock.charge(flow, 1)
        served.append(flow)
    return served


def test_flows_are_served_in_turn() -> None:
    """Catches a flow that has many requests and gets many turns for them."""
    clock = FairClock()
    for _ in range(1000):
        clock.enter("many")
    clock.enter("one")
    served = serve_least(clock, ["many", "one"], 100)
    assert served.count("one") == 50


def test_a_flow_that_was_away_has_saved_up_nothing() -> None:
    """Catches a tenant that comes back and has the engine to itself for as long as it was away."""
    clock = FairClock()
    clock.enter("old")
    clock.enter("away")
    clock.leave("away")
    serve_least(clock, ["old"], 1000)
    clock.enter("away")
    assert serve_least(clock, ["old", "away"], 20).count("away") <= 11


def test_a_waiting_flow_is_not_starved_by_new_ones() -> None:
    """Catches a clock that stands still: ever new trees would be served before an old one."""
    clock = FairClock()
    clock.enter("old")
    clock.charge("old", 50)
    for number in range(1000):
        clock.enter(f"new{number}")
        flow = min(["old", f"new{number}"], key=clock.tag)
        clock.charge(flow, 10)
        clock.leave(f"new{number}")
        if flow == "old":
            return
    raise AssertionError("it was never served")


def start(bench: Bench, tenant: str, prompt: list[int], count: int, max_tokens: int) -> Generation:
    """Creates a context of a tenant, and generates on branches of it; no step is run."""
    root = bench.run(
        bench.engine.contexts.create(tenant, prompt, lease=DEFAULT_TERMS)
    ).answer.context
    params = SamplingParams(max_tokens=max_tokens)
    return bench.engine.inference.generate_branches(tenant, root.id, count, params)


def steps_until(bench: Bench, generation: Generation) -> int:
    """Steps until a generation is done; returns how many it took."""
    for number in range(1, 2000):
        bench.step()
        if generation.is_done:
            return number
    raise AssertionError("no progress")


def test_a_thousand_branches_do_not_starve_one_request() -> None:
    """Catches a tenant that waits until another one's thousand branches have ended."""
    bench = Bench(num_blocks=3000, max_running=16)
    many = start(bench, "many", numbers(1, 40), 1000, 50)
    bench.steps(3)
    prompt = numbers(2, 20)
    one = start(bench, "one", prompt, 1, 10)
    assert steps_until(bench, one) <= 15
    assert finish_of(one.take_news()).usage.generated_tokens == 10
    assert not many.is_done
    bench.engine.cancel(many)


def test_many_long_prompts_do_not_keep_the_budget() -> None:
    """Catches chunks handed out by age alone: a short prompt behind long ones of another tenant."""
    bench = Bench(num_blocks=3000, budget=64, chunk=32)
    for number in range(20):
        bench.engine.contexts.create("many", numbers(number, 2000))
    bench.steps(3)
    short = bench.engine.contexts.create("one", numbers(50, 100))
    for _ in range(12):
        bench.step()
    assert short.is_done and short.error is None


def test_a_full_pool_makes_room_for_a_tenant_that_has_nothing() -> None:
    """Catches blocks that one tenant's running requests keep from all others."""
    bench = Bench(num_blocks=24, block_size=4)
    many = [start(bench, "many", numbers(number, 12), 1, 300) for number in range(5)]
    bench.steps(3)
    prompt = numbers(9, 12)
    one = start(bench, "one", prompt, 1, 8)
    assert steps_until(bench, one) <= 40
    assert bench.engine.view().num_preemptions > 0
    for generation in many:
        bench.engine.cancel(generation)


def test_trees_of_one_tenant_are_served_in_turn() -> None:
    """Catches a small tree that waits for all branches of a large one."""
    bench = Bench(num_blocks=3000, max_running=8)
    large = start(bench, "t", numbers(1, 40), 200, 6)
    bench.steps(2)
    small = start(bench, "t", numbers(2, 40), 2, 6)
    assert steps_until(bench, small) <= 30
    assert not large.is_done
    bench.engine.cancel(large)


def test_siblings_run_in_one_batch() -> None:
    """Catches trees that are mixed so that no step holds all branches of any."""
    bench = Bench(num_blocks=3000, max_running=8)
    roots = [bench.create(numbers(number, 20)) for number in range(3)]
    params = SamplingParams(max_tokens=4)
    trees = [bench.engine.inference.generate_branches(TENANT, root, 8, params) for root in roots]
    num_steps = 0
    while bench.engine.has_work:
        bench.step()
        running = [sum(request.is_running for request in tree.requests) for tree in trees]
        assert sorted(running) in ([0, 0, 8], [0, 0, 0])
        num_steps += 1
    assert num_steps <= 13, "places stood empty"
    bench.end()


def test_random_tenants_all_end_with_their_own_tokens() -> None:
    """Catches a livelock between tenants, or a preemption that changes a token."""
    draw = random.Random(5)
    bench = Bench(num_blocks=30, block_size=4, budget=24, chunk=8, max_running=6)
    expected = []
    for number in range(60):
        tenant, prompt = f"t{draw.randrange(4)}", numbers(number, draw.randrange(1, 30))
        count = draw.randrange(1, 12)
        operation = bench.engine.contexts.create(tenant, prompt)
        expected.append((tenant, prompt, count, operation))
        bench.steps(draw.randrange(4))
    bench.drain()
    generations = []
    for tenant, _, count, operation in expected:
        context = operation.answer.context.id
        params = SamplingParams(max_tokens=count)
        generations.append(bench.engine.inference.generate(tenant, context, params))
    bench.drain()
    for (tenant, prompt, count, operation), generation in zip(expected, generations, strict=True):
        assert generation.error is None
        tokens = bench.engine.observer.tokens(tenant, operation.answer.context.id)
        assert list(tokens) == prompt + continuation(prompt, count)
