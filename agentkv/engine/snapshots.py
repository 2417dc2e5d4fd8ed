"""Save, Restore, list and delete: contexts on the engine's thread, files on a thread of their own.

It owns the order: what is verified before what, and what is undone when one of it fails or the
caller goes away. KV passes in pieces of `PIECE_BYTES`, so that neither memory nor a step ever
waits for a whole tree; steps run between the pieces.
"""

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import TypeVar

from agentkv.core.lease import LeaseTerms
from agentkv.core.model_identity import Fingerprint
from agentkv.core.tree_planting import Planting
from agentkv.engine.engine import Engine
from agentkv.engine.engine_thread import EngineThread
from agentkv.engine.outputs import Restored, Saved, SnapshotView
from agentkv.engine.snapshot_desk import KVPorter, Saving
from agentkv.engine.snapshot_files import (
    MAX_HEADER,
    read_image,
    read_parts,
    write_parts,
    write_tokens,
)
from agentkv.engine.snapshot_manifest import FileEntry, KVEntry, Manifest, runs_of
from agentkv.engine.snapshot_store import SnapshotFolder
from agentkv.engine.snapshot_writer import SnapshotWriter
from agentkv.errors import ContextLost, InvalidRequest, Reason

PIECE_BYTES = 32 << 20
"""Bytes of KV that are on their way at once."""
_Answer = TypeVar("_Answer")


class Snapshots:
    """Save and Restore of one engine.

    Invariants: a caller that goes away leaves neither files nor held blocks behind; what is
    restored was verified before anything of it was planted.
    """

    def __init__(self, engine: Engine, thread: EngineThread) -> None:
        self._engine = engine
        self._thread = thread
        self._files = ThreadPoolExecutor(1, "agentkv-snapshots")

    def close(self) -> None:
        """Ends the thread once what it is writing is written or undone."""
        self._files.shutdown(wait=True)

    async def list(self, tenant: str) -> list[SnapshotView]:
        """Lists a tenant's snapshots by name."""
        folder = self._folder()
        manifests = await self._on_disk(lambda: folder.store.all(tenant))
        return [_view(manifest) for manifest in manifests]

    async def delete(self, tenant: str, name: str) -> None:
        """Removes a snapshot.

        Raises:
            NotFound: There is none of this name.
        """
        folder = self._folder()
        await self._on_disk(lambda: folder.store.delete(tenant, name))

    # -- save --------------------------------------------------------------------------------

    async def save(
        self,
        tenant: str,
        context_id: str,
        name: str,
        *,
        recursive: bool = False,
        with_kv: bool = True,
        overwrite: bool = False,
    ) -> Saved:
        """Saves a context, and all that descend from it if `recursive`.

        Raises:
            NotFound: The handle is unknown.
            InvalidRequest: It is no name, it is in use, or snapshots are off.
            PoolExhausted: The tenant's snapshots or the disk are full.
        """
        folder, desk = self._folder(), self._engine.snapshots
        begin = partial(desk.begin, tenant, context_id, recursive=recursive, with_kv=with_kv)
        saving: Saving = await self._begin(begin, desk.end)
        try:
            return await self._save(folder, tenant, name, saving, overwrite=overwrite)
        finally:
            self._thread.post(partial(desk.end, saving))

    async def _save(
        self, folder: SnapshotFolder, tenant: str, name: str, saving: Saving, *, overwrite: bool
    ) -> Saved:
        porter = self._porter
        need = 4 * saving.image.num_tokens + porter.bytes_per_block * len(saving.blocks)
        begun = self._files.submit(folder.store.begin, tenant, name, need, overwrite=overwrite)
        is_done = False
        try:
            writer = await asyncio.shield(asyncio.wrap_future(begun))
            entry = await self._on_disk(lambda: write_tokens(writer, porter, saving.image))
            kv = await self._save_kv(writer, saving) if saving.blocks else None
            manifest = Manifest(
                name=name,
                create_time=time.time(),
                model_name=self._engine.facts.name,
                model=folder.model,
                folder=writer.folder,
                tokens=entry,
                kv=kv,
                runs=runs_of(saving.image),
                contexts=saving.image.contexts,
            )
            await self._on_disk(lambda: writer.commit(manifest))
            is_done = True
        finally:
            if not is_done:
                self._abort(begun)
        return Saved(_view(manifest), await self._thread.call(self._engine.observer.pool))

    async def _save_kv(self, writer: SnapshotWriter, saving: Saving) -> KVEntry:
        desk = self._engine.snapshots
        per_file = max(1, PIECE_BYTES // self._porter.bytes_per_block)
        files: list[FileEntry] = []
        for first in range(0, len(saving.blocks), per_file):
            last = min(first + per_file, len(saving.blocks))
            parts = await self._thread.call(partial(desk.read, saving, first, last))
            file_name = f"kv-{len(files):06d}.safetensors"
            files.append(
                await self._on_disk(partial(write_parts, writer, self._porter, file_name, parts))
            )
        layout = self._porter.layout
        return KVEntry(layout, desk.block_size, len(saving.blocks), per_file, tuple(files))

    def _abort(self, begun: Future[SnapshotWriter]) -> None:
        """Removes what was written, after what is being written on the same thread.

        Whatever is asked of the folder from now on comes after that.
        """

        def abort() -> None:
            if begun.exception() is None:
                begun.result().abort()

        try:
            self._files.submit(abort)
        except RuntimeError:  # closed meanwhile
            abort()

    # -- restore -----------------------------------------------------------------------------

    async def restore(
        self,
        tenant: str,
        name: str,
        *,
        with_kv: bool = True,
        lease: LeaseTerms | None = None,
        request_id: str | None = None,
    ) -> Restored:
        """Makes contexts of a snapshot, with new handles and the lineage they had.

        KV is used when it is whole, of this server's layout, and there is room for it without
        anybody giving way; otherwise the next use computes it.

        Raises:
            NotFound: There is none of this name.
            ContextLost: It is torn, or its tokens are not what was saved.
            InvalidRequest: It is another model's, or does not fit this server; snapshots are off.
            PoolExhausted: A limit on contexts, depth or pins.
        """
        folder = self._folder()
        body = (name, with_kv, lease)
        known = await self._thread.call(lambda: self._known(tenant, request_id, body))
        if isinstance(known, Restored):
            return known
        manifest = await self._on_disk(lambda: folder.store.read(tenant, name))
        _require_model(manifest, folder.model)
        await self._on_disk(lambda: folder.store.require_whole(tenant, manifest))
        image = await self._on_disk(
            lambda: read_image(folder.store, self._porter, tenant, manifest)
        )
        await self._on_disk(lambda: self._engine.snapshots.check(image))
        refusal = await self._check_kv(folder, tenant, manifest) if with_kv else None
        uses_kv = with_kv and manifest.kv is not None and not refusal
        planted = image if uses_kv else image.without_kv()
        desk = self._engine.snapshots
        planting: Planting = await self._begin(lambda: desk.plant(tenant, planted), desk.abandon)
        try:
            if uses_kv:
                await self._restore_kv(folder, tenant, manifest, planting)
            finish = partial(self._finish, tenant, planting, lease, request_id, body, refusal or "")
            return await self._begin(finish, partial(self._forget, tenant, request_id))
        finally:
            self._thread.post(partial(desk.abandon, planting))

    async def _check_kv(
        self, folder: SnapshotFolder, tenant: str, manifest: Manifest
    ) -> str | None:
        """Reads all KV through; says why it is of no use, or None when it is."""
        kv, desk = manifest.kv, self._engine.snapshots
        if kv is None:
            return None
        if kv.block_size != desk.block_size:
            return f"its blocks have {kv.block_size} tokens, and here {desk.block_size}"
        if dict(kv.layout) != self._porter.layout:
            return "KV is stored differently here"
        most = kv.blocks_per_file * self._porter.bytes_per_block + MAX_HEADER
        if any(entry.num_bytes > most for entry in kv.files):
            return "a file of it is larger than its blocks"
        try:
            for entry in kv.files:
                await self._on_disk(partial(folder.store.verify_file, tenant, manifest, entry))
        except ContextLost as error:
            return error.message
        return None

    async def _restore_kv(
        self, folder: SnapshotFolder, tenant: str, manifest: Manifest, planting: Planting
    ) -> None:
        kv, desk = manifest.kv, self._engine.snapshots
        assert kv is not None
        for number, entry in enumerate(kv.files):
            first = number * kv.blocks_per_file
            last = min(first + kv.blocks_per_file, kv.num_blocks)
            read = partial(
                read_parts, folder.store, self._porter, tenant, manifest, entry, last - first
            )
            parts = await self._on_disk(read)
            await self._thread.call(partial(desk.write, planting, first, last, parts))

    def _finish(
        self,
        tenant: str,
        planting: Planting,
        lease: LeaseTerms | None,
        request_id: str | None,
        body: object,
        refusal: str,
    ) -> Restored:
        """Makes the contexts, on the engine's thread, unless a repeat of the call was faster."""
        known = self._known(tenant, request_id, body)
        if isinstance(known, Restored):
            return known
        num_kv_tokens = planting.num_computed
        contexts = self._engine.snapshots.finish(planting, lease)
        saved_ids = tuple(saved.id for saved in planting.image.contexts)
        pool = self._engine.observer.pool()
        restored = Restored(contexts, saved_ids, num_kv_tokens, refusal, pool)
        now = self._engine.clock.now()
        self._engine.replies.record(tenant, "Restore", request_id, body, restored, now)
        return restored

    def _known(self, tenant: str, request_id: str | None, body: object) -> object | None:
        """Finds the answer to an earlier call with this id, on the engine's thread."""
        now = self._engine.clock.now()
        return self._engine.replies.find(tenant, "Restore", request_id, body, now)

    def _forget(self, tenant: str, request_id: str | None, restored: Restored) -> None:
        """Releases contexts that nobody hears of; with a request id a repeat may ask for them."""
        if request_id is None:
            ids = [context.id for context in restored.contexts]
            self._engine.contexts.release(tenant, ids, allow_missing=True)

    # -- inside ------------------------------------------------------------------------------

    def _folder(self) -> SnapshotFolder:
        folder = self._engine.snapshot_folder
        if folder is None:
            raise InvalidRequest(
                "This server keeps no snapshots: start it with --snapshot-dir FOLDER.",
                reason=Reason.SNAPSHOTS_OFF,
            )
        return folder

    @property
    def _porter(self) -> KVPorter:
        porter = self._engine.snapshots.porter
        assert porter is not None, "a folder of snapshots without anything to carry KV"
        return porter

    async def _on_disk(self, work: Callable[[], _Answer]) -> _Answer:
        return await asyncio.get_running_loop().run_in_executor(self._files, work)

    async def _begin(
        self, begin: Callable[[], _Answer], undo: Callable[[_Answer], None]
    ) -> _Answer:
        """Calls `begin` on the engine's thread; undoes it if the caller has gone meanwhile."""
        call = asyncio.ensure_future(self._thread.call(begin))
        try:
            return await asyncio.shield(call)
        except asyncio.CancelledError:
            call.add_done_callback(partial(self._undo, undo))
            raise

    def _undo(self, undo: Callable[[_Answer], None], call: "asyncio.Future[_Answer]") -> None:
        if not call.cancelled() and call.exception() is None:
            self._thread.post(partial(undo, call.result()))


def _view(manifest: Manifest) -> SnapshotView:
    return SnapshotView(
        manifest.name,
        manifest.create_time,
        manifest.model_name,
        len(manifest.contexts),
        manifest.num_tokens,
        manifest.num_computed,
        manifest.num_bytes,
    )


def _require_model(manifest: Manifest, model: Fingerprint) -> None:
    differences = manifest.model.differences(model)
    if differences:
        raise InvalidRequest(
            f"The snapshot {manifest.name} was made with another model "
            f"({manifest.model_name}): its {', '.join(differences)} differ from what this server "
            "serves.",
            reason=Reason.MODEL_MISMATCH,
            metadata={"differences": ",".join(differences), "model": manifest.model_name},
        )
