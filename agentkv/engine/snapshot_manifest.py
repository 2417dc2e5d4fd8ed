"""The manifest of a snapshot: everything but tokens and KV, as JSON with a checksum of its own.

It owns the format and trusts nothing it reads: every number is checked before anything is sized by
it. It knows no folder.
"""

import hashlib
import json
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentkv.core.lease import LeaseMode
from agentkv.core.model_identity import Fingerprint
from agentkv.core.tree_image import ROOT, ImageContext, ImageNode, TreeImage
from agentkv.errors import ContextLost, Reason

FORMAT = "agentkv snapshot"
VERSION = 1
MAX_MANIFEST_BYTES = 64 << 20
MAX_NUMBER = 1 << 48
"""No count, position or size of a snapshot is above this."""


@dataclass(frozen=True, slots=True)
class FileEntry:
    """One file of a snapshot."""

    name: str
    num_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class KVEntry:
    """The KV of a snapshot."""

    layout: Mapping[str, str]
    """What a block consists of; KV of another layout is of no use."""
    block_size: int
    num_blocks: int
    blocks_per_file: int
    """Blocks of every file but the last."""
    files: tuple[FileEntry, ...]


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a snapshot holds."""

    name: str
    create_time: float
    model_name: str
    model: Fingerprint
    folder: str
    """Where its other files lie, beside the manifest."""
    tokens: FileEntry
    kv: KVEntry | None
    runs: tuple[tuple[int, int, int], ...]
    """Of each run of tokens: its parent, how many tokens it has, and how many of them have KV."""
    contexts: tuple[ImageContext, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of its files beside the manifest."""
        kv = self.kv.files if self.kv is not None else ()
        return self.tokens.num_bytes + sum(entry.num_bytes for entry in kv)

    @property
    def num_tokens(self) -> int:
        """Counts the tokens, shared ones once."""
        return sum(count for _, count, _ in self.runs)

    @property
    def num_computed(self) -> int:
        """Counts the tokens whose KV it holds."""
        return sum(computed for _, _, computed in self.runs) if self.kv is not None else 0

    def image(self, tokens: "array[int]") -> TreeImage:
        """Puts the contexts together from their tokens.

        Args:
            tokens: Those of all runs, in order.
        """
        nodes: list[ImageNode] = []
        offset = 0
        for parent, count, computed in self.runs:
            start = 0 if parent == ROOT else nodes[parent].end
            run = tokens[offset : offset + count]
            nodes.append(ImageNode(parent, start, run, start + computed))
            offset += count
        return TreeImage(tuple(nodes), self.contexts)


def runs_of(image: TreeImage) -> tuple[tuple[int, int, int], ...]:
    """Describes the runs of an image without their tokens."""
    return tuple(
        (node.parent, len(node.tokens), node.num_computed - node.start) for node in image.nodes
    )


def encode_manifest(manifest: Manifest) -> bytes:
    """Writes a manifest."""
    body = {
        "format": FORMAT,
        "version": VERSION,
        "name": manifest.name,
        "create_time": manifest.create_time,
        "model_name": manifest.model_name,
        "model": {name: getattr(manifest.model, name) for name in Fingerprint.__slots__},
        "folder": manifest.folder,
        "tokens": _file(manifest.tokens),
        "kv": None if manifest.kv is None else _kv(manifest.kv),
        "runs": [list(run) for run in manifest.runs],
        "contexts": [
            {
                "id": context.id,
                "node": context.node,
                "parent": context.parent,
                "fork_position": context.fork_position,
                "ordinal": context.ordinal,
                "labels": dict(context.labels),
                "lease_mode": context.lease_mode.value,
                "lease_ttl": context.lease_ttl,
            }
            for context in manifest.contexts
        ],
    }
    return _dump({**body, "sha256": hashlib.sha256(_dump(body)).hexdigest()})


def decode_manifest(data: bytes, name: str) -> Manifest:
    """Reads the manifest of a snapshot of this name.

    Raises:
        ContextLost: It is damaged, of another version, or does not add up.
    """
    try:
        body = json.loads(data)
    except (ValueError, RecursionError):
        raise corrupt(name, "its manifest is no JSON") from None
    if not isinstance(body, dict) or body.get("format") != FORMAT:
        raise corrupt(name, "its manifest is none of a snapshot")
    if body.get("version") != VERSION:
        raise corrupt(
            name, f"its format is version {body.get('version')!r}, and this server reads {VERSION}"
        )
    checksum = body.pop("sha256", None)
    if checksum != hashlib.sha256(_dump(body)).hexdigest():
        raise corrupt(name, "its manifest does not have the checksum it names")
    try:
        manifest = _manifest(body)
    except _Wrong as wrong:
        raise corrupt(name, f"its manifest has a wrong {wrong}") from None
    if manifest.name != name:
        raise corrupt(name, "its manifest belongs to a snapshot of another name")
    return manifest


def corrupt(name: str, what: str) -> ContextLost:
    """Makes the answer to whoever wants a damaged snapshot."""
    return ContextLost(
        f"The snapshot {name} cannot be restored: {what}. Nothing was restored.",
        reason=Reason.SNAPSHOT_CORRUPT,
        metadata={"snapshot": name},
    )


class _Wrong(Exception):
    """Names the field that is wrong."""


def _manifest(body: Mapping[str, Any]) -> Manifest:
    model = _table(body, "model")
    runs = tuple(_run(item, number) for number, item in enumerate(_list(body, "runs")))
    kv = None if body.get("kv") is None else _read_kv(_table(body, "kv"))
    return Manifest(
        name=_text(body, "name"),
        create_time=_float(body, "create_time"),
        model_name=_text(body, "model_name"),
        model=Fingerprint(**{name: _text(model, name) for name in Fingerprint.__slots__}),
        folder=_text(body, "folder"),
        tokens=_read_file(_table(body, "tokens")),
        kv=kv,
        runs=runs,
        contexts=tuple(_read_context(item) for item in _list(body, "contexts")),
    )


def _run(item: object, number: int) -> tuple[int, int, int]:
    if not (isinstance(item, list) and len(item) == 3 and all(type(part) is int for part in item)):
        raise _Wrong("run")
    parent, count, computed = item
    if not (ROOT <= parent < number and 1 <= count < MAX_NUMBER and 0 <= computed <= count):
        raise _Wrong("run")
    return parent, count, computed


def _read_context(item: object) -> ImageContext:
    if not isinstance(item, dict):
        raise _Wrong("context")
    labels = _table(item, "labels")
    if not all(isinstance(value, str) for value in labels.values()):
        raise _Wrong("labels")
    mode = _text(item, "lease_mode")
    if mode not in set(LeaseMode):
        raise _Wrong("lease_mode")
    return ImageContext(
        id=_text(item, "id"),
        node=_int(item, "node", low=ROOT),
        parent=None if item.get("parent") is None else _int(item, "parent"),
        fork_position=_int(item, "fork_position"),
        ordinal=_int(item, "ordinal", high=1 << 64),
        labels=labels,
        lease_mode=LeaseMode(mode),
        lease_ttl=_float(item, "lease_ttl"),
    )


def _file(entry: FileEntry) -> dict[str, object]:
    return {"name": entry.name, "bytes": entry.num_bytes, "sha256": entry.sha256}


def _read_file(item: Mapping[str, Any]) -> FileEntry:
    return FileEntry(_text(item, "name"), _int(item, "bytes"), _text(item, "sha256"))


def _kv(kv: KVEntry) -> dict[str, object]:
    return {
        "layout": dict(kv.layout),
        "block_size": kv.block_size,
        "num_blocks": kv.num_blocks,
        "blocks_per_file": kv.blocks_per_file,
        "files": [_file(entry) for entry in kv.files],
    }


def _read_kv(item: Mapping[str, Any]) -> KVEntry:
    files = tuple(_read_file(_as_table(entry, "files")) for entry in _list(item, "files"))
    num_blocks = _int(item, "num_blocks")
    per_file = _int(item, "blocks_per_file", low=1)
    if len(files) != -(-num_blocks // per_file):
        raise _Wrong("number of files")
    layout = {name: _text(_table(item, "layout"), name) for name in _table(item, "layout")}
    return KVEntry(layout, _int(item, "block_size", low=1), num_blocks, per_file, files)


def _table(item: Mapping[str, Any], name: str) -> dict[str, Any]:
    return _as_table(item.get(name), name)


def _as_table(value: object, name: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _Wrong(name)
    return value


def _list(item: Mapping[str, Any], name: str) -> Sequence[object]:
    value = item.get(name)
    if not isinstance(value, list):
        raise _Wrong(name)
    return value


def _text(item: Mapping[str, Any], name: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise _Wrong(name)
    return value


def _int(item: Mapping[str, Any], name: str, *, low: int = 0, high: int = MAX_NUMBER) -> int:
    value = item.get(name)
    if type(value) is not int or not low <= value < high:
        raise _Wrong(name)
    return value


def _float(item: Mapping[str, Any], name: str) -> float:
    value = item.get(name)
    if not isinstance(value, int | float) or not 0 <= value < MAX_NUMBER:
        raise _Wrong(name)
    return float(value)


def _dump(body: Mapping[str, object]) -> bytes:
    return json.dumps(body, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()
