"""From a config to an engine: load the model, prove it, size the pool.

Everything that happens once, at start. Nothing here runs again.
"""

import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from agentkv.config import EngineConfig, PoolConfig
from agentkv.engine.engine import Engine
from agentkv.engine.outputs import ModelFacts
from agentkv.engine.tokenizer import Tokenizer
from agentkv.errors import InvalidRequest
from agentkv.model.golden_check import check_model
from agentkv.model.kv_cache import KVCache
from agentkv.model.loader import LoadedModel, load_model
from agentkv.model.model_runner import ModelRunner
from agentkv.model.model_shape import ModelShape, describe_model
from agentkv.model.random_stream import fresh_seed
from agentkv.model.sampler import Sampler

DEFAULT_POOL_SHARE = 5
"""The pool takes one part in so many of the memory that is free."""
DEFAULT_POOL_LIMIT = 4 << 30


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
    report("Comparing forked branches with the model's own attention")
    shape = describe_model(loaded.model)
    sampler = Sampler()
    with _one_thread():  # a few rows a step gain nothing from more, and lose on a busy machine
        check_model(loaded.model, shape, sampler, block_size=config.block_size)
    num_blocks = _num_blocks(config, shape)
    kv = KVCache(shape, num_blocks=num_blocks, block_size=config.block_size)
    tokenizer = Tokenizer(loaded.tokenizer)
    return Engine(
        ModelRunner(loaded.model, kv, sampler),
        _facts(loaded, config, kv, tokenizer),
        tokenizer,
        pool=PoolConfig(num_blocks=num_blocks, block_size=config.block_size),
        scheduler=config.scheduler,
        limits=config.limits,
        end_token_ids=frozenset(loaded.eos_token_ids),
        new_id=_new_handles(),
        new_seed=fresh_seed,
    )


@contextmanager
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _new_handles() -> Callable[[], str]:
    """Makes handles: the id of this replica, then 128 random bits."""
    replica = secrets.token_hex(4)
    return lambda: f"{replica}.{secrets.token_urlsafe(16)}"


def _num_blocks(config: EngineConfig, shape: ModelShape) -> int:
    if config.num_blocks is not None:
        return config.num_blocks
    memory = config.kv_memory
    if memory is None:
        memory = min(_free_memory(shape.device) // DEFAULT_POOL_SHARE, DEFAULT_POOL_LIMIT)
    num_blocks = memory // shape.bytes_per_block(config.block_size)
    if num_blocks < 1:
        raise InvalidRequest(
            f"{memory} bytes do not hold one block of "
            f"{shape.bytes_per_block(config.block_size)} bytes; give the pool more memory."
        )
    return num_blocks


def _free_memory(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _facts(
    loaded: LoadedModel, config: EngineConfig, kv: KVCache, tokenizer: Tokenizer
) -> ModelFacts:
    return ModelFacts(
        name=loaded.name,
        architecture=loaded.architecture,
        vocab_size=loaded.vocab_size,
        max_length=min(loaded.max_length, config.max_length or loaded.max_length),
        num_layers=loaded.num_layers,
        dtype=str(loaded.dtype).removeprefix("torch."),
        bytes_per_block=kv.bytes_per_block,
        has_chat_template=tokenizer.has_chat_template,
    )
