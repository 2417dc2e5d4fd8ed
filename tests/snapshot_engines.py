"""Tiny engines that save to a folder, and what tests do with them.

It owns how a scenario runs beside an engine's thread. It knows no expected answer.
"""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

from tiny_engines import TinyEngine
from tiny_models import build_tiny_model

from agentkv.config import SnapshotConfig
from agentkv.core.lease import LeaseMode, LeaseTerms
from agentkv.core.model_identity import Fingerprint
from agentkv.engine.async_engine import AsyncEngine
from agentkv.engine.outputs import Chunk
from agentkv.engine.snapshot_store import SnapshotFolder, SnapshotStore
from agentkv.sampling_params import SamplingParams

TENANT = "tenant"
MODEL = Fingerprint("Tiny", "float32", "config", "weights", "tokenizer")
AnswerT = TypeVar("AnswerT")


def tiny(
    folder: Path,
    *,
    num_blocks: int = 64,
    block_size: int = 4,
    model: Fingerprint = MODEL,
    max_bytes: int = 1 << 30,
    max_count: int = 100,
    family: str = "llama",
    host_blocks: int = 0,
) -> TinyEngine:
    config = SnapshotConfig(dir=str(folder), max_bytes=max_bytes, max_count=max_count)
    return TinyEngine(
        build_tiny_model(family),
        num_blocks=num_blocks,
        block_size=block_size,
        host_blocks=host_blocks,
        snapshot_folder=SnapshotFolder(SnapshotStore(config), model),
    )


def run(engine: TinyEngine, work: Callable[[AsyncEngine], Awaitable[AnswerT]]) -> AnswerT:
    async def main() -> AnswerT:
        served = AsyncEngine(engine.engine)
        await served.start()
        try:
            return await work(served)
        finally:
            await served.stop()

    answer = asyncio.run(main())
    engine.engine.check()
    return answer


async def generate(
    engine: AsyncEngine, context_id: str, count: int, *, seed: int | None = None
) -> list[int]:
    params = SamplingParams(max_tokens=count, temperature=0.0 if seed is None else 1.0, seed=seed)
    tokens: list[int] = []
    async with engine.generate(TENANT, context_id, params) as stream:
        async for updates in stream:
            for update in updates:
                if isinstance(update, Chunk):
                    tokens.extend(update.token_ids)
    return tokens


async def grow(engine: AsyncEngine) -> str:
    """Makes a root with branches at its head, inside a block and at a block's end."""
    root = (await engine.create(TENANT, range(1, 15), labels={"who": "root"})).context
    head = (await engine.fork(TENANT, root.id, count=2)).contexts
    early = (await engine.fork(TENANT, root.id, at=6, labels={"who": "early"})).contexts[0]
    whole = (await engine.fork(TENANT, root.id, at=8)).contexts[0]
    await generate(engine, head[0].id, 5)
    await engine.extend(TENANT, early.id, [40, 41, 42])
    await engine.extend(TENANT, whole.id, [50])
    await engine.fork(TENANT, early.id, at=7, lease=LeaseTerms(LeaseMode.DROPPABLE, 77.0))
    return root.id


async def shape_of(engine: AsyncEngine, root_id: str) -> list[tuple[object, ...]]:
    """Describes a tree by everything but its handles."""
    page = await engine.list(TENANT, root_id=root_id)
    order = {view.id: number for number, view in enumerate(page.contexts)}
    return [
        (
            order.get(view.parent_id or ""),
            view.fork_position,
            view.depth,
            view.labels,
            view.lease.mode,
            view.lease.ttl,
            (await engine.tokens(TENANT, view.id)).token_ids,
        )
        for view in page.contexts
    ]
