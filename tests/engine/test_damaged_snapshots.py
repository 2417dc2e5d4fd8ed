"""Snapshots that are torn, foreign or too large: refused with a reason, and nothing is left."""

import asyncio
import hashlib
import json
import resource
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from snapshot_engines import TENANT, generate, grow, run, tiny
from tiny_engines import TinyEngine

from agentkv.core.model_identity import Fingerprint
from agentkv.engine import snapshots
from agentkv.engine.async_engine import AsyncEngine
from agentkv.engine.outputs import Restored
from agentkv.errors import AgentKVError, PoolExhausted, Reason

Damage = Callable[[Path], None]


def refusal(engine: TinyEngine, work: Callable[[AsyncEngine], Awaitable[object]]) -> AgentKVError:
    """Runs what should be refused; checks that nothing is left of it in the engine."""

    async def main(served: AsyncEngine) -> AgentKVError:
        with pytest.raises(AgentKVError) as refused:
            await work(served)
        view = await served.view()
        assert view.num_contexts == 0
        assert view.pool.free == view.pool.total
        return refused.value

    return run(engine, main)


def saved(folder: Path) -> Path:
    """Saves a tree, and returns the tenant's folder."""

    async def save(engine: AsyncEngine) -> None:
        await engine.save(TENANT, await grow(engine), "tree", recursive=True)

    run(tiny(folder), save)
    (tenant,) = folder.iterdir()
    return tenant


def restoring(engine: AsyncEngine) -> Awaitable[object]:
    return engine.restore(TENANT, "tree")


def flip(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def overwrite(tenant: Path, text: str) -> None:
    (tenant / "tree.json").write_text(text)


def file_of(tenant: Path, name: str) -> Path:
    (path,) = tenant.glob(f"data-*/{name}")
    return path


def rewritten(change: Callable[[dict[str, Any]], object]) -> Damage:
    """Changes the manifest and gives it a checksum that is right again: a lie, no accident."""

    def damage(tenant: Path) -> None:
        path = tenant / "tree.json"
        body = json.loads(path.read_bytes())
        del body["sha256"]
        change(body)
        plain = json.dumps(body, sort_keys=True, separators=(",", ":")).encode()
        body["sha256"] = hashlib.sha256(plain).hexdigest()
        path.write_text(json.dumps(body))

    return damage


def set_run(place: int, value: int) -> Damage:
    return rewritten(lambda body: body["runs"][0].__setitem__(place, value))


DAMAGES: dict[str, Damage] = {
    "a flipped byte of the manifest": lambda tenant: flip(tenant / "tree.json", 300),
    "a cut manifest": lambda tenant: cut(tenant / "tree.json"),
    "an empty manifest": lambda tenant: overwrite(tenant, ""),
    "a nested manifest": lambda tenant: overwrite(tenant, "[" * 100_000),
    "a flipped token": lambda tenant: flip(file_of(tenant, "tokens.safetensors"), -1),
    "cut tokens": lambda tenant: cut(file_of(tenant, "tokens.safetensors")),
    "no tokens": lambda tenant: file_of(tenant, "tokens.safetensors").unlink(),
    "cut KV": lambda tenant: cut(file_of(tenant, "kv-000000.safetensors")),
    "no KV": lambda tenant: file_of(tenant, "kv-000000.safetensors").unlink(),
    "a newer version": rewritten(lambda body: body.update(version=2)),
    "another name": rewritten(lambda body: body.update(name="other")),
    "a folder elsewhere": rewritten(lambda body: body.update(folder="../..")),
    "a file elsewhere": rewritten(lambda body: body["tokens"].update(name="../tree.json")),
    "a huge run": set_run(1, 1 << 40),
    "a number beyond all": set_run(1, 1 << 200),
    "a run without tokens": set_run(1, 0),
    "KV for tokens it has not": set_run(2, 1 << 20),
    "less KV than blocks": set_run(2, 0),
    "a run below a later one": set_run(0, 3),
    "a huge file": rewritten(lambda body: body["tokens"].update(bytes=1 << 47)),
    "as many blocks as it likes": rewritten(lambda body: body["kv"].update(num_blocks=1 << 40)),
    "another block size": rewritten(lambda body: body["kv"].update(block_size=3)),
    "a context that ends nowhere": rewritten(lambda body: body["contexts"][1].update(node=99)),
    "a context before its parent": rewritten(lambda body: body["contexts"][1].update(parent=4)),
    "an unknown lease": rewritten(lambda body: body["contexts"][0].update(lease_mode="forever")),
    "labels that are no text": rewritten(lambda body: body["contexts"][0].update(labels={"a": 1})),
    "no contexts at all": rewritten(lambda body: body.update(contexts=None)),
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_what_is_torn_or_lies_is_refused_and_can_be_deleted(tmp_path: Path, kind: str) -> None:
    """Would catch a half restored tree, memory sized by a lie, and damage nobody can remove."""
    tenant = saved(tmp_path)
    DAMAGES[kind](tenant)
    engine = tiny(tmp_path)
    error = refusal(engine, restoring)
    assert error.reason is Reason.SNAPSHOT_CORRUPT, error
    assert "tree" in error.message

    engine = tiny(tmp_path)
    run(engine, lambda served: served.delete_snapshot(TENANT, "tree"))
    assert refusal(tiny(tmp_path), restoring).reason is Reason.SNAPSHOT_NOT_FOUND


def test_flipped_kv_is_computed_again_from_whole_tokens(tmp_path: Path) -> None:
    """Would catch damaged KV in the pool, or tokens given up for its sake."""
    tenant = saved(tmp_path)
    flip(file_of(tenant, "kv-000000.safetensors"), -1)

    async def restore(engine: AsyncEngine) -> tuple[Restored, list[int]]:
        restored = await engine.restore(TENANT, "tree")
        return restored, await generate(engine, restored.contexts[0].id, 5)

    async def cold(engine: AsyncEngine) -> list[int]:
        created = await engine.create(TENANT, range(1, 15))
        return await generate(engine, created.context.id, 5)

    restored, tokens = run(tiny(tmp_path), restore)
    assert restored.num_kv_tokens == 0
    assert "checksum" in restored.kv_refusal
    assert tokens == run(tiny(tmp_path), cold)


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


def remains(folder: Path) -> list[str]:
    """Lists the files of a folder of snapshots."""
    return sorted(path.name for path in folder.rglob("*") if path.is_file())


async def _refused(engine: AsyncEngine, name: str, **options: bool) -> AgentKVError:
    root_id = (await engine.list(TENANT)).contexts[0].id
    with pytest.raises(AgentKVError) as refused:
        await engine.save(TENANT, root_id, name, **options)
    return refused.value


def test_a_full_disk_is_told_and_nothing_remains(tmp_path: Path) -> None:
    """Would catch half a snapshot that fills the disk, or blocks held for it ever after."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    async def save(engine: AsyncEngine) -> AgentKVError:
        await grow(engine)
        live = (await engine.view()).pool.live
        resource.setrlimit(resource.RLIMIT_FSIZE, (600, hard))
        try:
            error = await _refused(engine, "tree", recursive=True)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert (await engine.view()).pool.live == live
        assert await engine.list_snapshots(TENANT) == []
        return error

    error = run(tiny(tmp_path), save)
    assert error.reason is Reason.DISK_FULL
    assert remains(tmp_path) == []


def test_a_tenant_keeps_within_its_bytes_and_its_count(tmp_path: Path) -> None:
    """Would catch a tenant that fills the disk, or one that counts another's snapshots."""

    async def save(engine: AsyncEngine) -> None:
        root_id = await grow(engine)
        await engine.save(TENANT, root_id, "first", with_kv=False)
        error = await _refused(engine, "second")
        assert isinstance(error, PoolExhausted)
        assert (error.reason, error.metadata["quota"]) == (Reason.TENANT_QUOTA, "snapshot_bytes")
        await engine.save(TENANT, root_id, "second", with_kv=False)
        error = await _refused(engine, "third", with_kv=False)
        assert (error.reason, error.metadata["quota"]) == (Reason.TENANT_QUOTA, "snapshots")
        await engine.save(TENANT, root_id, "second", with_kv=False, overwrite=True)
        other = (await engine.create("other", [1, 2, 3])).context
        await engine.save("other", other.id, "first", with_kv=False)
        assert [item.num_tokens for item in await engine.list_snapshots("other")] == [3]
        await engine.delete_snapshot(TENANT, "first")
        assert [item.name for item in await engine.list_snapshots(TENANT)] == ["second"]

    run(tiny(tmp_path, max_bytes=4000, max_count=2), save)


def test_a_name_in_use_is_refused_and_replaced_only_when_asked(tmp_path: Path) -> None:
    """Would catch a snapshot lost to a slip of the name, and files that no manifest names."""

    async def save(engine: AsyncEngine) -> None:
        root_id = await grow(engine)
        await engine.save(TENANT, root_id, "tree")
        before = remains(tmp_path)
        assert (await _refused(engine, "tree")).reason is Reason.SNAPSHOT_EXISTS
        await engine.extend(TENANT, root_id, [9])
        saved = await engine.save(TENANT, root_id, "tree", overwrite=True)
        assert saved.snapshot.num_tokens == 15
        assert remains(tmp_path) == before

    run(tiny(tmp_path), save)


@pytest.mark.parametrize("turns", range(0, 24, 2))
def test_a_caller_that_goes_away_leaves_nothing_behind(
    tmp_path: Path, turns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Would catch files, held blocks or contexts left by a call cancelled at some point."""
    monkeypatch.setattr(snapshots, "PIECE_BYTES", 1)  # a file per block: many points to stop at

    async def cancelled(work: Awaitable[object]) -> bool:
        task = asyncio.ensure_future(work)
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        (ended,) = await asyncio.gather(task, return_exceptions=True)
        return isinstance(ended, asyncio.CancelledError)

    async def main(engine: AsyncEngine) -> None:
        root_id = await grow(engine)
        await engine.save(TENANT, root_id, "tree", recursive=True)
        before, num_files = await engine.view(), len(remains(tmp_path))
        if await cancelled(engine.save(TENANT, root_id, "other", recursive=True)):
            await engine.list_snapshots(TENANT)  # comes after what the thread has to undo
            names = {item.name for item in await engine.list_snapshots(TENANT)}
            assert len(remains(tmp_path)) == num_files * len(names)
        if await cancelled(engine.restore(TENANT, "tree")):
            await engine.list_snapshots(TENANT)
            after = await engine.view()
            while after.num_contexts != before.num_contexts:  # told to the engine a moment later
                after = await engine.view()
            assert after.pool.live == before.pool.live

    run(tiny(tmp_path), main)
