"""From a config to an engine: load the model, prove it, size the pool.

Everything that happens once, at start. Nothing here runs again.
"""

import secrets
from collections.abc import Callable
from dataclasses import replace

import torch

from agentkv.config import EngineConfig, PoolConfig
from agentkv.engine.engine import Engine
from agentkv.engine.outputs import ModelFacts
from agentkv.engine.pool_size import choose_num_blocks
from agentkv.engine.serving_model import ServingModel, capture_graphs
from agentkv.engine.snapshot_store import SnapshotFolder, SnapshotStore
from agentkv.engine.tiers import BuiltTiers, build_tiers
from agentkv.engine.tokenizer import Tokenizer
from agentkv.model.device_memory import memory_of
from agentkv.model.fingerprint import fingerprint
from agentkv.model.kv_cache import KVCache
from agentkv.model.kv_image import KVImages
from agentkv.model.loader import LoadedModel, load_model
from agentkv.model.random_stream import fresh_seed


def build_engine(config: EngineConfig, report: Callable[[str], None] = lambda _: None) -> Engine:
    """Loads a model and makes an engine for it.

    Args:
        config: The model, and with what means to serve it.
        report: Called with a line before anything that takes long.

    Raises:
        InvalidRequest: There is no such model or device, or the pool cannot be had.
        UnsupportedModelError: The model cannot be served exactly.
    """
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
    loaded = load_model(config.model, dtype=config.dtype, device=config.device, report=report)
    return build_engine_for(loaded, config, report)


def build_engine_for(
    loaded: LoadedModel, config: EngineConfig, report: Callable[[str], None] = lambda _: None
) -> Engine:
    """Makes an engine for a model that is loaded already; otherwise as `build_engine`."""
    identity = None
    if config.snapshots.dir is not None:  # before the weights are packed or rounded
        report("Taking the model's fingerprint")
        identity = fingerprint(loaded)
    serving = ServingModel.prepare(loaded, config, report)
    snapshot_folder = None
    if identity is not None:
        served = replace(identity, dtype=f"{identity.dtype}, weights {serving.weights.kind}")
        snapshot_folder = SnapshotFolder(SnapshotStore(config.snapshots), served)
    if config.is_on_gpu:
        report("Measuring the largest step")
    facts = serving.measure(memory_of(loaded.device))
    num_blocks = choose_num_blocks(config, serving.bytes_per_block, facts, on_gpu=config.is_on_gpu)
    runner = serving.runner(num_blocks)
    if config.graphs is not False and config.is_on_gpu:
        capture_graphs(runner, serving.max_graph_rows, report)
    tokenizer = Tokenizer(loaded.tokenizer)
    tiers = build_tiers(runner.kv, config)
    return Engine(
        runner,
        _facts(loaded, serving, runner.kv, tokenizer, tiers),
        tokenizer,
        pool=PoolConfig(
            num_blocks=num_blocks,
            block_size=config.block_size,
            host_blocks=tiers.host_blocks,
            disk_blocks=tiers.disk_blocks,
        ),
        mover=tiers.mover,
        scheduler=config.scheduler,
        limits=config.limits,
        leases=config.leases,
        pressure=config.pressure,
        quotas=config.quotas,
        porter=KVImages(runner.kv),
        snapshot_folder=snapshot_folder,
        end_token_ids=frozenset(loaded.eos_token_ids),
        new_id=_new_handles(),
        new_seed=fresh_seed,
    )


def _new_handles() -> Callable[[], str]:
    """Makes handles: the id of this replica, then 128 random bits."""
    replica = secrets.token_hex(4)
    return lambda: f"{replica}.{secrets.token_urlsafe(16)}"


def _facts(
    loaded: LoadedModel,
    serving: ServingModel,
    kv: KVCache,
    tokenizer: Tokenizer,
    tiers: BuiltTiers,
) -> ModelFacts:
    return ModelFacts(
        name=loaded.name,
        architecture=loaded.architecture,
        vocab_size=loaded.vocab_size,
        max_length=min(loaded.max_length, serving.config.max_length or loaded.max_length),
        num_layers=loaded.num_layers,
        dtype=str(loaded.dtype).removeprefix("torch."),
        bytes_per_block=kv.bytes_per_block,
        host_bytes_per_block=tiers.bytes_per_row,
        has_chat_template=tokenizer.has_chat_template,
        weights=serving.weights.kind,
        weight_bytes=serving.weights.num_bytes,
        adapters=serving.adapters.names,
    )
