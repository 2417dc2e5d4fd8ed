"""AgentKV in this process: contexts fork, on an engine that is stepped by hand."""

import importlib.metadata
import time
from dataclasses import dataclass

import torch

from agentkv.config import EngineConfig
from agentkv.engine.build import build_engine
from agentkv.engine.engine import Engine
from agentkv.engine.operations import Generation
from agentkv.engine.outputs import Chunk, Finish
from agentkv.sampling_params import SamplingParams
from benchmarks.peers.protocol import (
    Job,
    Load,
    Loaded,
    Node,
    Outcome,
    peak_rss,
    reset_peak_rss,
    serve,
)

TENANT = "benchmark"
SETTINGS = "contexts fork at any token and are released after their last use; defaults otherwise"


@dataclass(slots=True)
class Growing:
    """One node that decodes."""

    operation: Generation
    num_tokens: int = 0
    first_token_at: float = 0.0

    def read(self) -> None:
        """Takes what the last step brought.

        Raises:
            AgentKVError: The branch failed.
        """
        for update in self.operation.take_news():
            if isinstance(update, Chunk):
                self.first_token_at = self.first_token_at or time.perf_counter()
                self.num_tokens += len(update.token_ids)
            elif isinstance(update, Finish) and update.error is not None:
                raise update.error


class LocalAgentKV:
    """One engine, stepped here."""

    def __init__(self, load: Load) -> None:
        self._engine: Engine = build_engine(
            EngineConfig(model=load.gguf, num_threads=load.num_threads, kv_memory=load.kv_bytes)
        )

    def loaded(self) -> Loaded:
        """Describes the engine."""
        view = self._engine.view()
        return Loaded(
            f"{importlib.metadata.version('agentkv-runtime')} on torch {torch.__version__}",
            SETTINGS,
            pool_bytes=view.pool.total * view.model.bytes_per_block,
        )

    def run(self, job: Job) -> Outcome:
        """Runs a job; its contexts are released and the cache is flushed afterwards."""
        reset_peak_rss()
        ids: dict[int, str] = {}
        num_generated: list[int] = []
        first_tokens: list[float] = []
        seconds: list[float] = []
        last_uses = job.last_uses()
        rows = self._rows
        for index, (is_measured, numbers) in enumerate(job.numbered()):
            begun = time.perf_counter()
            nodes = [job.nodes[number] for number in numbers]
            new = self._open(nodes, ids)
            ids.update(zip(numbers, new, strict=True))
            grown = self._decode(nodes, new)
            num_generated += [growing.num_tokens if growing else 0 for growing in grown]
            over = [number for number in ids if last_uses[number] <= index]
            self._engine.contexts.release(TENANT, [ids.pop(number) for number in over])
            if is_measured:
                seconds.append(time.perf_counter() - begun)
                first_tokens += [g.first_token_at - begun for g in grown if g]
            else:
                rows = self._rows
        rows = self._rows - rows
        self._engine.flush_cache()
        return Outcome(tuple(seconds), tuple(first_tokens), tuple(num_generated), rows, peak_rss())

    @property
    def _rows(self) -> int:
        return self._engine.view().computed_tokens

    def _open(self, nodes: list[Node], ids: dict[int, str]) -> list[str]:
        """Makes the contexts of a wave, with the tokens they are given computed together."""
        contexts = self._engine.contexts
        new, created, extended = [], {}, []
        for number, node in enumerate(nodes):
            if node.parent is None:  # its handle comes with the answer
                created[number] = contexts.create(TENANT, node.given)
                new.append("")
                continue
            (view,) = contexts.fork(TENANT, ids[node.parent], at=node.at)
            new.append(view.id)
            if node.given:
                extended.append(contexts.extend(TENANT, view.id, node.given))
        for number, operation in created.items():
            new[number] = self._engine.run(operation).answer.context.id
        for operation in extended:
            self._engine.run(operation)
        return new

    def _decode(self, nodes: list[Node], ids: list[str]) -> list[Growing | None]:
        grown = [
            Growing(
                self._engine.inference.generate(
                    TENANT,
                    context_id,
                    SamplingParams(
                        max_tokens=node.decode, temperature=1.0, ignore_eos=True, seed=number
                    ),
                )
            )
            if node.decode
            else None
            for number, (node, context_id) in enumerate(zip(nodes, ids, strict=True))
        ]
        active = [growing for growing in grown if growing]
        while any(not growing.operation.is_done for growing in active):
            self._engine.step()
            for growing in active:
                growing.read()
        return grown


if __name__ == "__main__":
    serve(LocalAgentKV)
