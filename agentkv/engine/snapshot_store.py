"""The folder of snapshots: names, sizes, and what is read of them, whole or not at all.

    DIR/<sha256 of the tenant>/NAME.json         the manifest; what has none is no snapshot
    DIR/<sha256 of the tenant>/data-RANDOM/      its files

The manifest is put in place last, by `snapshot_writer`. It knows no context and no tensor; every
method may be slow, and belongs on a thread that may wait for the disk.
"""

import hashlib
import re
import secrets
import shutil
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from agentkv.config import SnapshotConfig
from agentkv.core.model_identity import Fingerprint
from agentkv.engine.snapshot_manifest import (
    MAX_MANIFEST_BYTES,
    FileEntry,
    Manifest,
    corrupt,
    decode_manifest,
)
from agentkv.engine.snapshot_writer import (
    DATA_FOLDER,
    SnapshotWriter,
    require_free,
    sync,
    telling,
    too_much,
)
from agentkv.errors import (
    ContextLost,
    InvalidRequest,
    NotFound,
    PoolExhausted,
    Reason,
)

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
ORPHAN_AGE = 3600.0
"""Seconds after which files without a manifest are of a server that was killed, not of one that
is writing them."""
READ_BYTES = 1 << 20


class SnapshotStore:
    """The snapshots of all tenants, each tenant's in a folder of its own.

    Invariants: a name leads nowhere but into its tenant's folder; a snapshot that can be listed
    was written to its end.
    """

    def __init__(self, config: SnapshotConfig) -> None:
        """Makes the folder, and removes what killed servers have left there.

        Raises:
            InvalidRequest: The folder cannot be used.
        """
        assert config.dir is not None
        self._config = config
        self._dir = Path(config.dir).expanduser()
        try:
            self._dir.mkdir(parents=True, exist_ok=True, mode=0o700)
            for tenant in self._dir.iterdir():
                if tenant.is_dir():
                    _remove_orphans(tenant)
        except OSError as error:
            raise InvalidRequest(
                f"The folder {config.dir} cannot be used for snapshots: {error.strerror}."
            ) from error

    def all(self, tenant: str) -> list[Manifest]:
        """Lists a tenant's snapshots by name; damaged ones are left out."""
        found = []
        for path in self._manifests(tenant):
            with suppress(NotFound, ContextLost):
                found.append(self.read(tenant, path.stem))
        return found

    def read(self, tenant: str, name: str) -> Manifest:
        """Reads what a snapshot holds.

        Raises:
            InvalidRequest: It is no name.
            NotFound: There is none of this name.
            ContextLost: It is damaged.
        """
        path = self._manifest_path(tenant, name)
        try:
            if path.stat().st_size > MAX_MANIFEST_BYTES:
                raise corrupt(name, "its manifest is too large")
            data = path.read_bytes()
        except FileNotFoundError:
            raise NotFound(
                f"There is no snapshot {name}.", reason=Reason.SNAPSHOT_NOT_FOUND
            ) from None
        except OSError as error:
            raise corrupt(name, f"its manifest cannot be read ({error.strerror})") from error
        manifest = decode_manifest(data, name)
        if not DATA_FOLDER.fullmatch(manifest.folder):
            raise corrupt(name, "its manifest names a folder that is none of a snapshot")
        return manifest

    def read_file(self, tenant: str, manifest: Manifest, entry: FileEntry) -> bytes:
        """Reads one file, which is exactly what was written.

        Raises:
            ContextLost: It is missing, of another size, or does not have its checksum.
        """
        return b"".join(self._verified(tenant, manifest, entry))

    def verify_file(self, tenant: str, manifest: Manifest, entry: FileEntry) -> None:
        """Reads one file through in little memory; otherwise as `read_file`."""
        for _ in self._verified(tenant, manifest, entry):
            pass

    def require_whole(self, tenant: str, manifest: Manifest) -> None:
        """Makes sure that every file is there in its size, without reading it.

        Raises:
            ContextLost: One is not.
        """
        kv = manifest.kv.files if manifest.kv is not None else ()
        for entry in (manifest.tokens, *kv):
            self._open_size(tenant, manifest, entry)

    def delete(self, tenant: str, name: str) -> None:
        """Removes a snapshot, a damaged one too.

        Raises:
            InvalidRequest: It is no name.
            NotFound: There is none of this name.
        """
        path = self._manifest_path(tenant, name)
        folder = None
        with suppress(ContextLost):
            folder = self.read(tenant, name).folder
        with telling(name):
            path.unlink(missing_ok=True)
            sync(path.parent)
        if folder is not None:
            shutil.rmtree(path.parent / folder, ignore_errors=True)

    def begin(self, tenant: str, name: str, num_bytes: int, *, overwrite: bool) -> SnapshotWriter:
        """Begins a snapshot of about so many bytes.

        Raises:
            InvalidRequest: It is no name, or it is in use and is not to be overwritten.
            PoolExhausted: It would exceed what the tenant may keep, or the disk is full.
        """
        path = self._manifest_path(tenant, name)
        require_free(path, overwrite=overwrite)
        with telling(name):
            path.parent.mkdir(exist_ok=True, mode=0o700)
        room = self._room(tenant, name)
        if num_bytes > room:
            raise too_much(num_bytes, room, self._config.max_bytes)
        folder = path.parent / f"data-{secrets.token_hex(16)}"
        with telling(name):
            folder.mkdir(mode=0o700)
        return SnapshotWriter(path, folder, room, self._config.max_bytes, overwrite=overwrite)

    def _room(self, tenant: str, name: str) -> int:
        """Counts the bytes a tenant may still write, beside the snapshot it may replace."""
        others = [path for path in self._manifests(tenant) if path.stem != name]
        if len(others) >= self._config.max_count:
            raise PoolExhausted(
                f"{len(others)} snapshots are kept, and {self._config.max_count} may be; delete "
                "some first.",
                reason=Reason.TENANT_QUOTA,
                metadata={"quota": "snapshots", "limit": self._config.max_count, "need": 1},
            )
        held = 0
        for path in others:
            with suppress(NotFound, ContextLost):
                held += self.read(tenant, path.stem).num_bytes + path.stat().st_size
        return self._config.max_bytes - held

    def _manifests(self, tenant: str) -> list[Path]:
        found = self._folder(tenant).glob("*.json")
        return sorted(path for path in found if NAME.fullmatch(path.stem))

    def _folder(self, tenant: str) -> Path:
        return self._dir / hashlib.sha256(tenant.encode()).hexdigest()

    def _manifest_path(self, tenant: str, name: str) -> Path:
        if not NAME.fullmatch(name):
            what = (
                "must be 1 to 128 letters, digits, points, dashes or underscores, and begin with a "
                "letter or digit"
            )
            raise InvalidRequest(f"The name of a snapshot {what}.", violations={"name": what})
        return self._folder(tenant) / f"{name}.json"

    def _open_size(self, tenant: str, manifest: Manifest, entry: FileEntry) -> Path:
        if not re.fullmatch(r"[a-z0-9-]+\.safetensors", entry.name):
            raise corrupt(manifest.name, "its manifest names a file that is none of a snapshot")
        path = self._folder(tenant) / manifest.folder / entry.name
        try:
            size = path.stat().st_size
        except OSError:
            raise corrupt(manifest.name, f"its file {entry.name} is missing") from None
        if size != entry.num_bytes:
            raise corrupt(
                manifest.name,
                f"its file {entry.name} has {size} bytes in place of {entry.num_bytes}",
            )
        return path

    def _verified(self, tenant: str, manifest: Manifest, entry: FileEntry) -> Iterator[bytes]:
        path, digest = self._open_size(tenant, manifest, entry), hashlib.sha256()
        try:
            with path.open("rb") as file:
                while piece := file.read(READ_BYTES):
                    digest.update(piece)
                    yield piece
        except OSError as error:
            raise corrupt(
                manifest.name, f"its file {entry.name} cannot be read ({error.strerror})"
            ) from error
        if digest.hexdigest() != entry.sha256:
            raise corrupt(manifest.name, f"its file {entry.name} does not have its checksum")


class SnapshotFolder(NamedTuple):
    """Where snapshots are kept, and for which model."""

    store: SnapshotStore
    model: Fingerprint


def _remove_orphans(tenant: Path) -> None:
    kept = set()
    for path in tenant.glob("*.json"):
        try:
            kept.add(decode_manifest(path.read_bytes(), path.stem).folder)
        except ContextLost:
            return  # perhaps of a newer server: whose files are whose is not known here
    for folder in tenant.glob("data-*"):
        with suppress(OSError):
            is_old = time.time() - folder.stat().st_mtime > ORPHAN_AGE
            if is_old and folder.name not in kept:
                shutil.rmtree(folder, ignore_errors=True)
