"""A loaded model made ready to serve: packed, compiled, proven, and its steps measured.

Owns the order of what happens to a model at start, and which of it the config asks for. It knows
no contexts, and does not decide how large the pool is.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedModel

from agentkv.config import EngineConfig
from agentkv.core.head_logits import KEPT_HEADS
from agentkv.engine.pool_size import MemoryFacts
from agentkv.errors import InvalidRequest
from agentkv.model.adapter_files import read_adapter
from agentkv.model.compiled import compile_model
from agentkv.model.device_memory import DeviceMemory
from agentkv.model.fused_linear import fuse_projections
from agentkv.model.golden_check import check_model
from agentkv.model.graph_sizes import row_sizes
from agentkv.model.kv_cache import KV_DTYPES, KVCache
from agentkv.model.largest_step import StepSize, run_largest_step
from agentkv.model.loader import LoadedModel
from agentkv.model.lora import AdapterStep, install_adapters
from agentkv.model.model_runner import ModelRunner
from agentkv.model.model_shape import ModelShape, describe_model
from agentkv.model.sampler import Sampler
from agentkv.model.weights import ServedWeights, WeightKind, choose_weights, convert_weights
from agentkv_kernels.native import load_native

Report = Callable[[str], None]
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ServingModel:
    """A model that computes what it should on shared blocks, and how to run it."""

    model: PreTrainedModel
    shape: ModelShape
    sampler: Sampler
    config: EngineConfig
    max_length: int
    """Most tokens of one context."""
    weights: ServedWeights
    adapters: AdapterStep

    @classmethod
    def prepare(cls, loaded: LoadedModel, config: EngineConfig, report: Report) -> "ServingModel":
        """Packs, compiles or rounds a model as the config says, and proves the result.

        Args:
            loaded: Changed in place.
            config: With what means to serve it.
            report: Called with a line before anything that takes long.

        Raises:
            InvalidRequest: This device cannot do what is asked for.
            UnsupportedModelError: The model cannot be served exactly.
        """
        _check_device(config, loaded.device)
        adapters = _install_adapters(loaded.model, config)
        native = load_native() if loaded.device.type == "cpu" else None
        kind = None if config.compile else choose_weights(config.weights, loaded.model, native)
        if kind is None and (
            config.is_on_gpu if config.fuse_weights is None else config.fuse_weights
        ):
            _log.info("Packed %d groups of projections", fuse_projections(loaded.model))
        shape = describe_model(loaded.model)
        if config.compile:
            report("Compiling the model, which takes a minute or more")
            compile_model(loaded.model)
        report("Comparing forked branches with the model's own attention")
        sampler = Sampler(native)
        _prove(loaded.model, shape, sampler, config, adapters)
        weights = convert_weights(loaded.model, kind, native)
        if kind is not None:  # once more: it is another model now
            _prove(loaded.model, shape, sampler, config, adapters, kind)
        return cls(loaded.model, shape, sampler, config, loaded.max_length, weights, adapters)

    @property
    def kv_dtype(self) -> torch.dtype | None:
        """What the pool stores; None: what the model computes."""
        return KV_DTYPES.get(self.config.kv_dtype)

    @property
    def bytes_per_block(self) -> int:
        """Bytes of K and V of one block, all layers."""
        return self.shape.bytes_per_block(self.config.block_size, self.kv_dtype)

    @property
    def max_graph_rows(self) -> int:
        """Rows of the largest step that runs as a graph: branches decoding together."""
        scheduler = self.config.scheduler
        return row_sizes(min(scheduler.token_budget, scheduler.max_running))[-1]

    def runner(self, num_blocks: int) -> ModelRunner:
        """Makes a pool and a runner on it.

        Raises:
            InvalidRequest: The device has no room for the pool.
        """
        with _fitting(f"A pool of {num_blocks} blocks of {self.bytes_per_block} bytes"):
            kv = KVCache(
                self.shape,
                num_blocks=num_blocks,
                block_size=self.config.block_size,
                dtype=self.kv_dtype,
            )
        invariant = self.config.batch_invariant
        return ModelRunner(
            self.model,
            kv,
            self.sampler,
            batch_invariant=invariant,
            fixed_rows=self.config.scheduler.token_budget if invariant else None,
            adapters=self.adapters,
        )

    def measure(self, memory: DeviceMemory) -> MemoryFacts:
        """Runs the largest step, and captures the largest graph, to see what they take.

        Raises:
            InvalidRequest: There is no room for such a step, even without a pool.
        """
        with _fitting(f"A step of {self.config.scheduler.token_budget} tokens"):
            step = memory.peak_of(self._run_largest_step)
        if self.config.graphs is not False and self.config.is_on_gpu:
            step += memory.peak_of(self._capture_largest_graph)
        heads = KEPT_HEADS * 4 * self.shape.vocab_size
        return MemoryFacts(memory.total(), memory.free(), step + heads)

    def _run_largest_step(self) -> None:
        rows = self.config.scheduler.token_budget
        size = StepSize(rows, self.max_length, self.config.block_size)
        run_largest_step(
            self.model,
            self.shape,
            self.sampler,
            size,
            kv_dtype=self.kv_dtype,
            batch_invariant=self.config.batch_invariant,
        )

    def _capture_largest_graph(self) -> None:
        rows = self.max_graph_rows
        capture_graphs(self.runner(num_blocks=1), rows, lambda _: None, sizes=(rows,))


def capture_graphs(
    runner: ModelRunner, max_rows: int, report: Report, sizes: tuple[int, ...] | None = None
) -> bool:
    """Makes a runner's graphs; where the model cannot be captured, it goes on without.

    Returns:
        Whether there are graphs now. Models whose work depends on numbers, such as those that
        send each token to a few experts, may read the device on the way, which a graph cannot.
    """
    try:
        runner.capture_graphs(max_rows, report, sizes=sizes)
    except RuntimeError as error:
        _log.warning("No CUDA graphs, so steps of decoding start slower: %s", error)
        return False
    return True


@contextmanager
def _fitting(what: str) -> Iterator[None]:
    """Says what did not fit when a GPU's memory runs out.

    Raises:
        InvalidRequest: In place of torch's own error.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise InvalidRequest(
            f"{what} does not fit in the device's memory beside the model's weights; lower the "
            f"token budget, make the pool smaller, or load a smaller model. ({error})"
        ) from error


def _check_device(config: EngineConfig, device: torch.device) -> None:
    """Refuses what this very GPU cannot do.

    Raises:
        InvalidRequest: Says what would do instead.
    """
    if config.kv_dtype == "fp8" and torch.cuda.get_device_capability(device) < (8, 9):
        raise InvalidRequest(
            "kv_dtype fp8 needs a GPU of compute capability 8.9 or above (Ada, Hopper); use int8."
        )


def _prove(
    model: PreTrainedModel,
    shape: ModelShape,
    sampler: Sampler,
    config: EngineConfig,
    adapters: AdapterStep,
    kind: WeightKind | None = None,
) -> None:
    """Runs the golden check on what will serve, with each adapter and with none.

    Raises:
        UnsupportedModelError: The model cannot be served exactly.
    """
    with _one_thread():  # a few rows gain nothing from more, and lose on a busy machine
        for adapter in ("", *adapters.names):
            check_model(
                model,
                shape,
                sampler,
                block_size=config.block_size,
                kv_dtype=KV_DTYPES.get(config.kv_dtype),
                weights=kind,
                batch_invariant=config.batch_invariant,
                adapters=adapters,
                adapter=adapter,
            )


def _install_adapters(model: PreTrainedModel, config: EngineConfig) -> AdapterStep:
    """Reads the adapters and puts them beside the model's layers.

    Raises:
        InvalidRequest: A folder cannot be read.
        UnsupportedModelError: An adapter does what cannot be served, or is another model's.
    """
    read = [read_adapter(adapter.name, Path(adapter.path)) for adapter in config.adapters]
    return install_adapters(model, read)


@contextmanager
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
