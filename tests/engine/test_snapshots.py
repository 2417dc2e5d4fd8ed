"""Save and Restore on real tiny models: what comes back is what was saved, and goes on alike."""

import random
from pathlib import Path

import pytest
import torch
from snapshot_engines import TENANT, generate, grow, run, shape_of, tiny

from agentkv.core.lease import LeaseMode, LeaseTerms
from agentkv.engine.async_engine import AsyncEngine
from agentkv.engine.outputs import Restored


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


def test_a_parked_context_is_saved_as_tokens_and_restored_beside_its_kv_on_the_host(
    tmp_path: Path,
) -> None:
    """Would catch KV written over what a lower tier is to bring back, and a save that waits."""

    async def work(engine: AsyncEngine) -> tuple[int, int, list[list[int]]]:
        id = (await engine.create(TENANT, range(1, 15))).context.id
        with_kv = await engine.save(TENANT, id, "before")
        await engine.update_lease(TENANT, id, LeaseTerms(LeaseMode.PARK))
        other = (await engine.create(TENANT, [50, 51])).context.id
        await generate(engine, other, 2)  # steps, in which it leaves
        assert (await engine.get(TENANT, id)).num_computed == 0
        parked = await engine.save(TENANT, id, "after")
        ids = [id]
        for name in ("before", "after"):
            ids += [view.id for view in (await engine.restore(TENANT, name)).contexts]
        tokens = [await generate(engine, id, 4, seed=2) for id in ids]
        return with_kv.snapshot.num_kv_tokens, parked.snapshot.num_kv_tokens, tokens

    with_kv, parked, tokens = run(tiny(tmp_path, host_blocks=16), work)
    assert (with_kv, parked) == (14, 0)
    assert tokens[0] == tokens[1] == tokens[2]
