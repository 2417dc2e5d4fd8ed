"""What is in a snapshot's files: tokens, and KV by the piece.

A porter says how either is encoded; the store and the writer say where it lies. Every call waits
for the disk.
"""

from array import array

from agentkv.core.tree_image import TreeImage, check_image
from agentkv.engine.snapshot_desk import KVPorter, Parts
from agentkv.engine.snapshot_manifest import FileEntry, Manifest, corrupt
from agentkv.engine.snapshot_store import SnapshotStore
from agentkv.engine.snapshot_writer import SnapshotWriter

MAX_HEADER = 1 << 16
"""Bytes of a file beside its tensors, at most."""


def write_tokens(writer: SnapshotWriter, porter: KVPorter, image: TreeImage) -> FileEntry:
    """Writes the tokens of all runs, one after the other.

    Raises:
        PoolExhausted, InternalError: See `SnapshotWriter.write`.
    """
    tokens = array("I")
    for node in image.nodes:
        tokens.extend(node.tokens)
    return writer.write("tokens.safetensors", porter.encode_tokens(tokens))


def read_image(
    store: SnapshotStore, porter: KVPorter, tenant: str, manifest: Manifest
) -> TreeImage:
    """Reads the tokens, and makes sure that they are what the manifest says.

    Raises:
        ContextLost: They are not.
    """
    if manifest.tokens.num_bytes > 4 * manifest.num_tokens + MAX_HEADER:
        raise corrupt(manifest.name, "its tokens take more bytes than there are tokens")
    data = store.read_file(tenant, manifest, manifest.tokens)
    tokens = porter.decode_tokens(data, manifest.num_tokens)
    if tokens is None:
        raise corrupt(manifest.name, "its tokens are not as many as its manifest says")
    image = manifest.image(tokens)
    wrong = check_image(image, manifest.kv.block_size if manifest.kv is not None else 1)
    if wrong is None and manifest.kv is not None:
        is_same = len(image.blocks(manifest.kv.block_size)) == manifest.kv.num_blocks
        wrong = None if is_same else "it has not as many blocks of KV as its tokens need"
    if wrong is not None:
        raise corrupt(manifest.name, wrong)
    return image


def write_parts(writer: SnapshotWriter, porter: KVPorter, name: str, parts: Parts) -> FileEntry:
    """Writes one file of KV.

    Raises:
        PoolExhausted, InternalError: See `SnapshotWriter.write`.
    """
    return writer.write(name, porter.encode(parts))


def read_parts(
    store: SnapshotStore,
    porter: KVPorter,
    tenant: str,
    manifest: Manifest,
    entry: FileEntry,
    num_blocks: int,
) -> Parts:
    """Reads one file of KV, of so many blocks.

    Raises:
        ContextLost: It is not what was written.
    """
    parts = porter.decode(store.read_file(tenant, manifest, entry), num_blocks)
    if parts is None:
        raise corrupt(manifest.name, f"its file {entry.name} holds other KV than it should")
    return parts
