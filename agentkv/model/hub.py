"""Finds or downloads a model's files on the Hugging Face Hub.

It knows repositories and folders, not what the files mean. A complete snapshot in the local cache
is used as it is, with no question to the network, so that starts are quick and work offline.
"""

import json
from collections.abc import Callable
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
)

from agentkv.errors import InvalidRequest

PATTERNS = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]
"""Files that are downloaded: never code, and no pickled weights."""


def find_snapshot(hub_id: str) -> Path | None:
    """Finds a complete snapshot in the local cache; None when there is none."""
    try:
        folder = Path(snapshot_download(hub_id, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError):
        return None
    return folder if has_weights(folder) else None


def fetch_snapshot(hub_id: str, report: Callable[[str], None]) -> Path:
    """Finds a snapshot in the local cache, or downloads it.

    Args:
        hub_id: `owner/name` of the repository.
        report: Called with a line before a download begins.

    Raises:
        InvalidRequest: There is no such repository, it holds no safetensors, or the Hub cannot
            be reached.
    """
    if (folder := find_snapshot(hub_id)) is not None:
        return folder
    report(f"Downloading {hub_id} from the Hugging Face Hub.")
    try:
        folder = Path(snapshot_download(hub_id, allow_patterns=PATTERNS))
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise InvalidRequest(
            f"The Hugging Face Hub has no model {hub_id!r} that you may read; check the name, or "
            "log in with `hf auth login`."
        ) from error
    except (HfHubHTTPError, OSError) as error:
        raise InvalidRequest(
            f"{hub_id!r} is not on this machine and the Hugging Face Hub cannot be reached; "
            "connect to the network, or pass a folder of safetensors or a .gguf file."
        ) from error
    if not has_weights(folder):
        raise InvalidRequest(
            f"{hub_id!r} holds no safetensors; convert its weights and pass the folder."
        )
    return folder


def has_weights(folder: Path) -> bool:
    """Whether a folder holds a config and every file of its safetensors."""
    if not (folder / "config.json").is_file():
        return False
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return any(folder.glob("*.safetensors"))
    try:
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (ValueError, KeyError, AttributeError):
        return False
    return all((folder / name).is_file() for name in names)
