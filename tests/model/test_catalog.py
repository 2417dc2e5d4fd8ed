"""Aliases: where they lead, and what is on this machine."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
from tiny_gguf import TinyGguf, build_llama

from agentkv.model import catalog
from agentkv.model.catalog import ALIASES, ModelAlias, PackagedFile, list_models
from agentkv.model.gguf import convert_gguf

TINY = PackagedFile("tiny_weights", "tiny.gguf")


@pytest.fixture
def tiny_alias(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModelAlias:
    """An alias whose package fails when imported, as one without its dependencies does."""
    package = tmp_path / "site" / "tiny_weights"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise ImportError('a dependency is missing')")
    TinyGguf(build_llama()).write(package / "tiny.gguf")
    monkeypatch.syspath_prepend(str(package.parent))
    alias = ModelAlias("tiny", "For tests", "CC0-1.0", "someone/tiny", (TINY,))
    monkeypatch.setattr(catalog, "ALIASES", {"tiny": alias})
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return alias


def test_weights_are_found_without_importing_their_package(tiny_alias: ModelAlias) -> None:
    """Catches a start that fails because a package of weights lacks its own dependencies."""
    source = tiny_alias.find_packaged()
    assert source is not None
    assert (source.stem, source.parts[0].name) == ("tiny", "tiny.gguf")
    assert "tiny_weights" not in sys.modules


def test_what_is_cached_is_listed(tiny_alias: ModelAlias, tmp_path: Path) -> None:
    """Catches a list that converts or downloads, or that shows what is not there."""
    root = tmp_path / "cache"
    (entry,) = list_models(root)
    assert (entry.alias, entry.path, entry.size_bytes) == (tiny_alias, None, 0)
    assert entry.packaged is not None
    folder = convert_gguf(entry.packaged, cache_root=root, report=lambda _: None)
    (entry,) = list_models(root)
    assert entry.path == folder
    assert entry.size_bytes == sum(path.stat().st_size for path in folder.iterdir())


def test_a_file_in_parts_is_the_same_file(tiny_alias: ModelAlias, tmp_path: Path) -> None:
    """Catches parts in the wrong order, and a start that takes some of them for the whole."""
    source = tiny_alias.find_packaged()
    assert source is not None
    data = source.parts[0].read_bytes()
    folder = source.parts[0].parent
    for number, piece in enumerate((data[:1000], data[1000:5000], data[5000:])):
        (folder / f"tiny.gguf.part{number}").write_bytes(piece)
    parts = tuple(PackagedFile("tiny_weights", f"tiny.gguf.part{number}") for number in range(3))
    split = replace(tiny_alias, packaged=parts).find_packaged()
    assert split is not None
    assert (split.stem, split.sha256()) == (source.stem, source.sha256())
    root = tmp_path / "cache"
    made = convert_gguf(split, cache_root=root, report=lambda _: None)
    assert convert_gguf(source, cache_root=root, report=lambda _: None) == made
    missing = (*parts, PackagedFile("tiny_weights", "tiny.gguf.part3"))
    assert replace(tiny_alias, packaged=missing).find_packaged() is None


def test_an_alias_without_its_package_is_looked_up_in_the_hubs_cache(
    tiny_alias: ModelAlias, monkeypatch: Any
) -> None:
    """Catches an alias that is useless on a machine where only the Hub's cache has it."""
    absent = PackagedFile("no_such_package", "x")
    alias = ModelAlias("tiny", "For tests", "CC0-1.0", "someone/tiny", (absent,))
    monkeypatch.setattr(catalog, "ALIASES", {"tiny": alias})
    (entry,) = list_models()
    assert (entry.path, entry.packaged) == (None, None)


def test_the_default_model_is_installed() -> None:
    """Catches an environment in which the quick start would go to the network."""
    source = ALIASES["smollm2"].find_packaged()
    assert source is not None
    assert source.parts[0].stat().st_size > 90_000_000
