"""Files of the disk tier: whole or not at all, checked when read, bounded, cleaned up."""

import errno
from pathlib import Path

import pytest
import torch
from bench import PARK
from tiny_engines import TinyEngine
from tiny_models import VOCAB_SIZE, build_tiny_model
from torch import Tensor

from agentkv.core.views import Residency
from agentkv.model.disk_store import HEADER, DiskStore, remove_left_over
from agentkv.sampling_params import SamplingParams

TENANT = "tenant"


def row(seed: int, size: int = 100) -> Tensor:
    """Bytes that differ from those of other seeds."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(256, (size,), dtype=torch.uint8, generator=generator)


def written(store: DiskStore) -> None:
    """Waits until all that was taken is on disk."""
    with store._changed:
        while store._writing:
            assert store._thread.is_alive()
            store._changed.wait(0.01)


def fetch(store: DiskStore, block_id: int) -> Tensor | None:
    """Reads a row ahead and takes it."""
    store.fetch(block_id)
    assert store.fetched(10.0) == [block_id]
    return store.take(block_id)


def test_a_row_comes_back_from_memory_and_from_its_file(tmp_path: Path) -> None:
    """Catches a row lost between its being taken and its being written, or mixed up."""
    store = DiskStore(tmp_path)
    assert store.write(3, row(1)) and store.write(4, row(2))
    for _ in range(2):
        first, second = fetch(store, 3), fetch(store, 4)
        assert first is not None and torch.equal(first, row(1))
        assert second is not None and torch.equal(second, row(2))
        written(store)
    store.write(3, row(5))
    newest = fetch(store, 3)
    assert newest is not None and torch.equal(newest, row(5))
    store.close()
    store.close()
    assert not list(tmp_path.iterdir()), "files outlive their process"


@pytest.mark.parametrize("damage", ["torn", "flipped", "missing", "foreign", "empty"])
def test_a_damaged_file_is_none(tmp_path: Path, damage: str) -> None:
    """Catches a torn or foreign file taken for KV, or raised to the caller."""
    store = DiskStore(tmp_path)
    store.write(0, row(1))
    written(store)
    (path,) = tmp_path.glob("*/0.kv")
    data = bytearray(path.read_bytes())
    match damage:
        case "torn":
            path.write_bytes(data[: HEADER.size + 50])
        case "flipped":
            data[HEADER.size + 7] ^= 1
            path.write_bytes(data)
        case "missing":
            path.unlink()
        case "foreign":
            path.write_bytes(b"something else entirely, and long enough for a header")
        case "empty":
            path.write_bytes(b"")
    assert fetch(store, 0) is None
    assert store.take(0) is None
    assert store.statistics().num_bad_reads >= 1
    store.close()


def test_a_full_disk_is_counted_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a full disk that ends the thread, leaves half a file, or is not told to anybody."""
    store = DiskStore(tmp_path)

    def full(self: DiskStore, block_id: int, row: Tensor) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(DiskStore, "_write_file", full)
        store.write(0, row(1))
        written(store)
    assert fetch(store, 0) is None
    counts = store.statistics()
    assert (counts.num_failed_writes, counts.num_written) == (1, 0)
    assert counts.last_failure == "No space left on device"
    store.write(0, row(2))
    written(store)
    after = fetch(store, 0)
    assert after is not None and torch.equal(after, row(2))
    store.close()


def test_what_a_dead_process_left_is_removed_and_a_living_one_keeps(tmp_path: Path) -> None:
    """Catches a folder that grows with every crash, or that loses another server's files."""
    dead = tmp_path / "agentkv-dead"
    dead.mkdir()
    (dead / "0.kv").write_bytes(b"old")
    (dead / "lock").touch()
    other = tmp_path / "something-else"
    other.mkdir()
    living = DiskStore(tmp_path)
    living.write(0, row(1))
    written(living)
    assert not dead.exists() and other.exists()
    assert remove_left_over(tmp_path) == 0
    kept = fetch(living, 0)
    assert kept is not None and torch.equal(kept, row(1))
    living.close()


def test_too_many_on_their_way_are_refused(tmp_path: Path) -> None:
    """Catches memory that grows without bound before a slow disk."""
    store = DiskStore(tmp_path, most_pending=2)
    with store._changed:  # the thread cannot go on meanwhile
        assert [store.write(n, row(n)) for n in range(3)] == [True, True, False]
    assert fetch(store, 2) is None
    assert store.statistics().num_refused == 1
    store.close()


def test_a_context_comes_back_from_disk_exactly(tmp_path: Path) -> None:
    """Catches KV that a file gives back to another block, or that a step waits for."""
    disk = DiskStore(tmp_path)
    made = TinyEngine(
        build_tiny_model("llama"), num_blocks=8, host_blocks=2, disk=disk, disk_blocks=8
    )
    prompt = [(5 * i + 1) % VOCAB_SIZE for i in range(18)]
    context = made.engine.run(made.engine.contexts.create(TENANT, prompt)).answer.context.id
    made.engine.contexts.update_lease(TENANT, context, PARK)
    made.engine.step()
    other = made.engine.run(made.engine.contexts.create(TENANT, prompt[::-1])).answer.context.id
    made.engine.contexts.update_lease(TENANT, other, PARK)
    made.engine.step()
    made.poison_free()
    assert made.engine.observer.get(TENANT, context).residency is Residency.DISK
    before = made.engine.view().computed_tokens
    params = SamplingParams(max_tokens=5)
    made.engine.run(made.engine.inference.generate(TENANT, context, params))
    assert made.engine.view().computed_tokens - before <= 5
    cold = TinyEngine(build_tiny_model("llama"))
    twin = cold.engine.run(cold.engine.contexts.create(TENANT, prompt)).answer.context.id
    cold.engine.run(cold.engine.inference.generate(TENANT, twin, params))
    assert made.tokens(TENANT, context) == cold.tokens(TENANT, twin)
    made.engine.check()
    made.engine.close()
