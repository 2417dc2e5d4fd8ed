"""Converted folders: complete or absent, made once, found again."""

import json
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from agentkv.model import conversion_cache
from agentkv.model.conversion_cache import CacheKey, find, find_or_build

KEY = CacheKey("model", "ab" * 32, 1)


class Builder:
    """Writes two files and counts how often it was asked to."""

    def __init__(self) -> None:
        self.num_calls = 0

    def __call__(self, folder: Path) -> None:
        self.num_calls += 1
        (folder / "config.json").write_text("{}")
        (folder / "model.safetensors").write_bytes(b"weights" * 100)


def leftovers(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir() if path.suffix != ".lock")


def test_a_folder_is_built_once_and_found_again(tmp_path: Path) -> None:
    """Catches a cache that is written and never read, or scratch files left behind."""
    build = Builder()
    assert find(tmp_path, KEY) is None
    folder = find_or_build(tmp_path, KEY, build)
    assert find_or_build(tmp_path, KEY, build) == folder == find(tmp_path, KEY)
    assert build.num_calls == 1
    assert leftovers(tmp_path) == [folder.name]
    assert conversion_cache.size_bytes(folder) > 700


def test_another_source_or_format_is_another_folder(tmp_path: Path) -> None:
    """Catches a new version of the converter that is served the old one's result."""
    build = Builder()
    keys = [KEY, CacheKey("model", "cd" * 32, 1), CacheKey("model", "ab" * 32, 2)]
    assert len({find_or_build(tmp_path, key, build) for key in keys}) == build.num_calls == 3


def cut_short(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])


def flip_a_bit(folder: Path) -> None:
    (folder / "config.json").write_text("[]")


def lose_a_file(folder: Path) -> None:
    (folder / "config.json").unlink()


def lose_the_manifest(folder: Path) -> None:
    (folder / "manifest.json").unlink()


def break_the_manifest(folder: Path) -> None:
    (folder / "manifest.json").write_text('{"files": 3')


def swap_the_manifest(folder: Path) -> None:
    path = folder / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"source_sha256": "00"}))


def add_a_file(folder: Path) -> None:
    (folder / "model-00002.safetensors").write_bytes(b"")


@pytest.mark.parametrize(
    "damage",
    [cut_short, flip_a_bit, lose_a_file, lose_the_manifest, break_the_manifest,
     swap_the_manifest, add_a_file],
)  # fmt: skip
def test_a_torn_folder_is_built_again(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    """Catches a crash, or a full disk, that leaves a model which loads and babbles."""
    build = Builder()
    folder = find_or_build(tmp_path, KEY, build)
    damage(folder)
    assert find(tmp_path, KEY) is None
    assert find_or_build(tmp_path, KEY, build) == folder
    assert build.num_calls == 2
    assert find(tmp_path, KEY) == folder
    assert leftovers(tmp_path) == [folder.name]


def test_a_build_that_fails_leaves_nothing(tmp_path: Path) -> None:
    """Catches half a conversion that the next start takes for a whole one."""

    def build(folder: Path) -> None:
        (folder / "config.json").write_text("{}")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        find_or_build(tmp_path, KEY, build)
    assert leftovers(tmp_path) == []
    assert find_or_build(tmp_path, KEY, Builder()).is_dir()


def test_two_starts_at_once_build_once(tmp_path: Path) -> None:
    """Catches two writers of one folder: the second waits, and finds what the first made."""
    inside, go_on = threading.Event(), threading.Event()
    first, second = Builder(), Builder()

    def slow(folder: Path) -> None:
        inside.set()
        assert go_on.wait(60)
        first(folder)

    found: list[Path] = []
    starts = [
        threading.Thread(target=lambda b=build: found.append(find_or_build(tmp_path, KEY, b)))
        for build in (slow, second)
    ]
    starts[0].start()
    assert inside.wait(60)
    starts[1].start()
    assert not found  # nobody sees a folder before it is whole
    assert find(tmp_path, KEY) is None
    go_on.set()
    for start in starts:
        start.join(60)
    assert found == [tmp_path / KEY.folder_name] * 2
    assert (first.num_calls, second.num_calls) == (1, 0)


def test_the_users_cache_is_the_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a cache that ignores where the user wants it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert conversion_cache.default_root() == tmp_path / "agentkv" / "models"
