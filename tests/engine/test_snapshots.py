"""Save and Restore on real tiny models: what comes back is what was saved, and goes on alike."""

import asyncio
import random
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import pytest
import torch
from tiny_engines import TinyEngine
from tiny_models import build_tiny_model

from agentkv.config import SnapshotConfig
from agentkv.core.lease import LeaseMode, LeaseTerms
from agentkv.engine.async_engine import AsyncEngine
from agentkv.engine.outputs import Chunk, Restored
from agentkv.engine.snapshot_store import SnapshotFolder, SnapshotStore
from agentkv.errors import AgentKVError, Reason
from agentkv.model.fingerprint import Fingerprint
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
) -> TinyEngine:
    config = SnapshotConfig(dir=str(folder), max_bytes=max_bytes, max_count=max_count)
    return TinyEngine(
        build_tiny_model(family),
        num_blocks=num_blocks,
        block_size=block_size,
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


@pytest.mark.parametrize("with_kv", [True, False])
def test_a_tree_comes_back_as_it_was_and_goes_on_alike(tmp_path: Path, with_kv: bool) -> None:
    """Would catch lost lineage, labels, leases or tokens, and a seed that changes its meaning."""
    first, second = tiny(tmp_path), tiny(tmp_path)

    async def save(engine: AsyncEngine) -> tuple[list[tuple[object, ...]], list[list[int]]]:
        root_id = await grow(engine)
        await engine.save(TENANT, root_id, "tree", recursive=True, with_kv=with_kv)
        ids = [view.id for view in (await engine.list(TENANT)).contexts]
        shape = await shape_of(engine, root_id)
        return shape, [await generate(engine, id, 6, seed=3) for id in ids]

    async def restore(
        engine: AsyncEngine,
    ) -> tuple[Restored, list[tuple[object, ...]], list[list[int]], int]:
        restored = await engine.restore(TENANT, "tree")
        ids = [view.id for view in restored.contexts]
        shape = await shape_of(engine, ids[0])
        before = (await engine.view()).computed_tokens
        goes_on = [await generate(engine, id, 6, seed=3) for id in ids]
        return restored, shape, goes_on, (await engine.view()).computed_tokens - before

    shape, goes_on = run(first, save)
    restored, shape_again, goes_on_again, computed = run(second, restore)
    assert shape_again == shape
    assert goes_on_again == goes_on
    num_tokens = {True: computed, False: 0}[with_kv]
    assert bool(restored.num_kv_tokens) == with_kv
    assert restored.kv_refusal == ""
    assert num_tokens <= 6 * len(goes_on)  # with KV only what is new, and one for each head


def test_restored_kv_is_the_saved_kv_to_the_byte_and_shared_prefixes_are_there_once(
    tmp_path: Path,
) -> None:
    """Would catch blocks in a wrong order, and a prefix that is written or restored per branch."""
    first, second = tiny(tmp_path), tiny(tmp_path)

    async def save(engine: AsyncEngine) -> tuple[list[list[int]], int]:
        root_id = await grow(engine)
        await engine.save(TENANT, root_id, "tree", recursive=True)
        ids = [view.id for view in (await engine.list(TENANT)).contexts]
        return [first.blocks(TENANT, id) for id in ids], (await engine.view()).pool.live

    async def restore(engine: AsyncEngine) -> tuple[list[list[int]], int]:
        ids = [view.id for view in (await engine.restore(TENANT, "tree")).contexts]
        return [second.blocks(TENANT, id) for id in ids], (await engine.view()).pool.live

    (tables, live), (tables_again, live_again) = run(first, save), run(second, restore)
    assert live_again == live
    for blocks, again in zip(tables, tables_again, strict=True):
        assert len(blocks) == len(again)
        saved, restored = first.content(blocks), second.content(again)
        is_used = ~restored.eq(0)
        assert is_used.any()
        assert torch.equal(saved[is_used], restored[is_used])


def test_a_snapshot_restored_beside_the_original_shares_its_whole_blocks(tmp_path: Path) -> None:
    """Would catch a restore that takes blocks for what the prefix cache has already."""
    engine = tiny(tmp_path)

    async def work(served: AsyncEngine) -> tuple[int, int]:
        root_id = (await served.create(TENANT, range(1, 13))).context.id
        await served.save(TENANT, root_id, "twin")
        before = (await served.view()).pool.live
        await served.restore(TENANT, "twin")
        return before, (await served.view()).pool.live

    before, after = run(engine, work)
    assert after == before


@pytest.mark.parametrize("seed", range(6))
def test_random_trees_come_back(tmp_path: Path, seed: int) -> None:
    """Would catch a shape of tree (cuts, copies, truncations, released parents) that does not."""
    first, second = tiny(tmp_path), tiny(tmp_path)
    draw = random.Random(seed)

    async def save(engine: AsyncEngine) -> dict[str, tuple[tuple[int, ...], list[int]]]:
        root_id = (await engine.create(TENANT, range(1, draw.randint(5, 12)))).context.id
        ids = [root_id]
        for _ in range(25):
            id = draw.choice(ids)
            length = (await engine.get(TENANT, id)).length
            match draw.randrange(5):
                case 0 | 1:
                    at = draw.randint(0, length)
                    ids += [v.id for v in (await engine.fork(TENANT, id, at=at)).contexts]
                case 2:
                    count = draw.randint(1, 5)
                    await engine.extend(TENANT, id, [draw.randrange(60) for _ in range(count)])
                case 3:
                    await engine.truncate(TENANT, id, draw.randint(0, length))
                case 4 if id != root_id:
                    ids.remove(id)
                    await engine.release(TENANT, [id])
        await engine.save(TENANT, root_id, "tree", recursive=True)
        return {id: await _goes_on(engine, id) for id in ids}

    async def restore(engine: AsyncEngine) -> dict[str, tuple[tuple[int, ...], list[int]]]:
        restored = await engine.restore(TENANT, "tree")
        pairs = zip(restored.saved_ids, restored.contexts, strict=True)
        engines_ids = {saved: view.id for saved, view in pairs}
        return {saved: await _goes_on(engine, id) for saved, id in engines_ids.items()}

    assert run(first, save) == run(second, restore)


async def _goes_on(engine: AsyncEngine, id: str) -> tuple[tuple[int, ...], list[int]]:
    tokens = (await engine.tokens(TENANT, id)).token_ids
    return tokens, await generate(engine, id, 3, seed=9) if tokens else []


def refusal(engine: TinyEngine, work: Callable[[AsyncEngine], Awaitable[object]]) -> AgentKVError:
    """Runs what should be refused; checks that nothing is left of it."""

    async def main(served: AsyncEngine) -> AgentKVError:
        with pytest.raises(AgentKVError) as refused:
            await work(served)
        view = await served.view()
        assert view.num_contexts == 0
        assert view.pool.free == view.pool.total
        return refused.value

    return run(engine, main)


def saved(folder: Path, *, recursive: bool = True) -> Path:
    """Saves a tree, and returns the tenant's folder."""

    async def save(engine: AsyncEngine) -> None:
        await engine.save(TENANT, await grow(engine), "tree", recursive=recursive)

    run(tiny(folder), save)
    (tenant,) = folder.iterdir()
    return tenant


def restoring(engine: AsyncEngine) -> Awaitable[object]:
    return engine.restore(TENANT, "tree")


def test_a_snapshot_of_another_model_is_refused_by_name(tmp_path: Path) -> None:
    """Would catch KV, or tokens, handed to a model that reads them differently."""
    saved(tmp_path)
    other = Fingerprint("Tiny", "float32", "config", "OTHER", "tokenizer")
    error = refusal(tiny(tmp_path, model=other), restoring)
    assert error.reason is Reason.MODEL_MISMATCH
    assert error.metadata["differences"] == "weights"


def test_kv_of_another_block_size_is_computed_again(tmp_path: Path) -> None:
    """Would catch a refusal, or a misread, where tokens are all that is needed."""
    saved(tmp_path)

    async def restore(engine: AsyncEngine) -> tuple[Restored, list[int]]:
        restored = await engine.restore(TENANT, "tree")
        return restored, await generate(engine, restored.contexts[0].id, 4)

    restored, tokens = run(tiny(tmp_path, block_size=8), restore)
    assert restored.num_kv_tokens == 0
    assert "8" in restored.kv_refusal
    assert len(tokens) == 4


def test_a_full_pool_restores_tokens_and_as_much_kv_as_there_is_room_for(tmp_path: Path) -> None:
    """Would catch a restore that fails, or takes blocks from others, for want of room."""
    saved(tmp_path)

    async def restore(engine: AsyncEngine) -> tuple[int, list[int]]:
        restored = await engine.restore(TENANT, "tree")
        return restored.num_kv_tokens, await generate(engine, restored.contexts[0].id, 2)

    num_kv_tokens, tokens = run(tiny(tmp_path, num_blocks=5), restore)
    assert 0 < num_kv_tokens <= 20
    assert len(tokens) == 2
