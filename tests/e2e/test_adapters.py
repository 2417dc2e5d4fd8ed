"""Contexts with adapters in one engine: exact beside each other, and nothing shared."""

from pathlib import Path

import pytest
from slow_twin import PlainModel
from tiny_adapters import merge, save_adapter
from tiny_engines import TEXT_VOCAB_SIZE, load_tiny
from tiny_models import build_tiny_model

from agentkv.config import AdapterConfig, EngineConfig, QuotaConfig, QuotasConfig
from agentkv.engine.build import build_engine_for
from agentkv.engine.engine import Engine
from agentkv.engine.outputs import Chunk
from agentkv.errors import InvalidRequest, PoolExhausted, Reason, UnsupportedModelError
from agentkv.sampling_params import SamplingParams

TENANT = "tenant"
PROMPT = [(7 * number + 3) % 90 + 5 for number in range(19)]
ADAPTERS = ("", "law", "code")


@pytest.fixture
def adapters(tmp_path: Path) -> tuple[AdapterConfig, ...]:
    model = build_tiny_model("llama", vocab_size=TEXT_VOCAB_SIZE)
    return tuple(
        AdapterConfig(name, str(save_adapter(tmp_path / name, model, seed=seed)))
        for seed, name in enumerate(ADAPTERS)
        if name
    )


def engine_with(adapters: tuple[AdapterConfig, ...], **more: object) -> Engine:
    config = EngineConfig(num_blocks=64, block_size=4, adapters=adapters, **more)  # type: ignore[arg-type]  # options by name
    return build_engine_for(load_tiny(), config)


def plain(name: str, adapters: tuple[AdapterConfig, ...]) -> PlainModel:
    model = build_tiny_model("llama", vocab_size=TEXT_VOCAB_SIZE)
    for adapter in adapters:
        if adapter.name == name:
            merge(model, Path(adapter.path))
    return PlainModel(model)


def create(engine: Engine, adapter: str) -> str:
    answer = engine.run(engine.contexts.create(TENANT, PROMPT, adapter=adapter)).answer
    assert answer.context.adapter == adapter
    return answer.context.id


def test_adapters_run_in_one_step_and_equal_their_merged_models(
    adapters: tuple[AdapterConfig, ...],
) -> None:
    """Catches rows computed with a neighbour's adapter, and a branch that forgets its own."""
    engine = engine_with(adapters)
    roots = {name: create(engine, name) for name in ADAPTERS}
    branches = {
        name: [view.id for view in engine.contexts.fork(TENANT, root, count=2, at=13)]
        for name, root in roots.items()
    }
    greedy = SamplingParams(max_tokens=6, logprobs=True)
    runs = [
        (name, context, length, engine.inference.generate(TENANT, context, greedy))
        for name in ADAPTERS
        for context, length in [(roots[name], 19), *((branch, 13) for branch in branches[name])]
    ]
    for name, context, length, operation in runs:
        engine.run(operation)
        chunks = [news for news in operation.take_news() if isinstance(news, Chunk)]
        tokens = [token for chunk in chunks for token in chunk.token_ids]
        logprobs = [logprob for chunk in chunks for logprob in chunk.logprobs]
        plain(name, adapters).check_greedy(PROMPT[:length], tokens, logprobs)
        assert engine.observer.get(TENANT, context).adapter == name
    for root in roots.values():
        engine.contexts.release(TENANT, [root], recursive=True)
    engine.flush_cache()
    engine.check()
    assert engine.observer.pool().free == 64


def test_nothing_is_shared_between_adapters(adapters: tuple[AdapterConfig, ...]) -> None:
    """Catches a prompt that finds the KV another adapter computed."""
    engine = engine_with(adapters)
    first = engine.run(engine.contexts.create(TENANT, PROMPT, adapter="law")).answer
    other = engine.run(engine.contexts.create(TENANT, PROMPT, adapter="code")).answer
    base = engine.run(engine.contexts.create(TENANT, PROMPT)).answer
    again = engine.run(engine.contexts.create(TENANT, PROMPT, adapter="law")).answer
    assert (first.usage.cached_tokens, other.usage.cached_tokens) == (0, 0)
    assert (base.usage.cached_tokens, again.usage.cached_tokens) == (0, 16)
    engine.check()


def test_a_tenants_quota_counts_all_its_adapters(adapters: tuple[AdapterConfig, ...]) -> None:
    """Catches a tenant that has its quota once for every adapter."""
    quotas = QuotasConfig(default=QuotaConfig(blocks=9))
    engine = engine_with(adapters, quotas=quotas)
    law = create(engine, "law")
    operation = engine.inference.generate(
        TENANT, law, SamplingParams(max_tokens=20, ignore_eos=True)
    )
    engine.step()
    with pytest.raises(PoolExhausted, match="quota"):
        engine.run(engine.contexts.create(TENANT, [*PROMPT, *PROMPT, *PROMPT], adapter="code"))
    engine.cancel(operation)
    engine.check()


def test_an_unknown_adapter_is_refused_by_name(adapters: tuple[AdapterConfig, ...]) -> None:
    """Catches a misspelt adapter served as the plain model."""
    engine = engine_with(adapters)
    with pytest.raises(InvalidRequest, match="no adapter 'lwa'; there are law, code") as refused:
        engine.contexts.create(TENANT, PROMPT, adapter="lwa")
    assert list(refused.value.violations) == ["adapter"]
    with pytest.raises(InvalidRequest, match="the server has none"):
        engine_with(()).contexts.create(TENANT, PROMPT, adapter="law")


def test_a_context_with_an_adapter_is_not_saved(adapters: tuple[AdapterConfig, ...]) -> None:
    """Catches a snapshot that is restored as a context of the model's own weights."""
    engine = engine_with(adapters)
    law = create(engine, "law")
    with pytest.raises(InvalidRequest, match="computed with the adapter law") as refused:
        engine.snapshots.begin(TENANT, law, recursive=True, with_kv=True)
    assert refused.value.reason is Reason.UNSUPPORTED_OPTION
    engine.check()


def test_options_that_do_not_go_with_adapters_are_refused(tmp_path: Path) -> None:
    """Catches two adapters of one name, and an option under which adapters are left out."""
    law = AdapterConfig("law", str(tmp_path))
    with pytest.raises(InvalidRequest, match="one name"):
        EngineConfig(adapters=(law, law))
    with pytest.raises(InvalidRequest, match="compile"):
        EngineConfig(adapters=(law,), compile=True)
    with pytest.raises(InvalidRequest, match="letters"):
        AdapterConfig("a/b", str(tmp_path))


def test_an_adapter_that_cannot_be_served_stops_the_start(tmp_path: Path) -> None:
    """Catches a server that begins without an adapter it was told to serve."""
    model = build_tiny_model("llama", vocab_size=TEXT_VOCAB_SIZE)
    folder = save_adapter(tmp_path / "law", model, seed=1, use_dora=True)
    with pytest.raises(UnsupportedModelError, match="law uses what cannot be served: use_dora"):
        engine_with((AdapterConfig("law", str(folder)),))
