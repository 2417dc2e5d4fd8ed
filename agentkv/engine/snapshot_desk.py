"""Save and Restore on the engine's thread: what happens to contexts and blocks between two steps.

Each method is short, however large the tree: KV passes in pieces. Files are `snapshot_store`'s
affair, and the order of it all is `snapshots`'.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from agentkv.core.context import Context
from agentkv.core.context_store import ContextStore
from agentkv.core.lease import LeaseTerms
from agentkv.core.lease_keeper import LeaseKeeper
from agentkv.core.lineage import family
from agentkv.core.observer import Observer
from agentkv.core.segment import Hold
from agentkv.core.tree_image import ROOT, StoredBlock, TreeImage, capture
from agentkv.core.tree_planting import Planting
from agentkv.core.views import ContextView
from agentkv.engine.engine_clock import EngineClock
from agentkv.engine.outputs import ModelFacts
from agentkv.errors import AgentKVError, ContextBusy, InvalidRequest, Reason

Parts = object
"""KV of some blocks on the host; what it is, the porter knows."""


class KVPorter(Protocol):
    """Carries KV of blocks between the pool and the host, and tokens and KV into files and back.

    What carries the pool's KV is called between steps, the rest on any thread.
    """

    @property
    def layout(self) -> dict[str, str]:
        """Says what a block consists of."""
        ...

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block."""
        ...

    def read(self, block_ids: Sequence[int], used: Sequence[int]) -> Parts:
        """Copies blocks to the host; slots beyond the used ones of each are zeros."""
        ...

    def write(self, block_ids: Sequence[int], rows: Sequence[int], parts: Parts) -> None:
        """Copies rows of what was read into blocks of the pool."""
        ...

    def encode(self, parts: Parts) -> bytes:
        """Writes what was read as a file."""
        ...

    def decode(self, data: bytes, num_blocks: int) -> Parts | None:
        """Reads a file of so many blocks; None when it is none."""
        ...

    def encode_tokens(self, tokens: "array[int]") -> bytes:
        """Writes tokens as a file."""
        ...

    def decode_tokens(self, data: bytes, num_tokens: int) -> "array[int] | None":
        """Reads a file of so many tokens; None when it is none."""
        ...


@dataclass(slots=True, eq=False)
class Saving:
    """Contexts that are being saved: their image, and what keeps its KV where it is."""

    image: TreeImage
    blocks: Sequence[StoredBlock]
    pins: list[Context]
    """Hidden branches, one per context; none when no KV is saved."""
    owners: Sequence[int]
    """By run: which pin's path it lies on."""


class SnapshotDesk:
    """What Save and Restore do to one store.

    Invariants: a saving or a planting that was begun is ended by `end`, `finish` or `abandon`;
    until then it holds blocks and no handle.
    """

    def __init__(
        self,
        store: ContextStore,
        observer: Observer,
        leases: LeaseKeeper,
        clock: EngineClock,
        facts: ModelFacts,
        porter: KVPorter | None,
    ) -> None:
        self.porter = porter
        """None when there is no KV to carry: then tokens alone are saved."""
        self._store = store
        self._observer = observer
        self._leases = leases
        self._clock = clock
        self._facts = facts

    # -- save --------------------------------------------------------------------------------

    @property
    def block_size(self) -> int:
        """Token positions per block."""
        return self._store.tree.block_size

    def begin(self, tenant: str, context_id: str, *, recursive: bool, with_kv: bool) -> Saving:
        """Takes the image of a context, and of all that descend from it if `recursive`.

        Requests may run on; they are of no influence, as on a fork. KV that is not on the device
        now is left out.

        Raises:
            NotFound: The handle is unknown.
            InvalidRequest: It has an adapter: a snapshot could not say which weights those are.
        """
        self._clock.tick()
        store, with_kv = self._store, with_kv and self.porter is not None
        context = store.get(tenant, context_id)
        if context.adapter:
            raise InvalidRequest(
                f"The context is computed with the adapter {context.adapter}; only contexts of the "
                "model's own weights can be saved.",
                reason=Reason.UNSUPPORTED_OPTION,
                violations={"context_id": "names a context with an adapter"},
            )
        contexts = family(context, store) if recursive else [context]
        pins = [store.fork_hidden(context, 1)[0] for context in contexts]
        tails = [pin.tail for pin in pins]
        image = capture(store.tree, contexts, tails, with_kv=with_kv)
        if with_kv:
            for pin in pins:
                store.set_hold(pin, Hold.FIRM)
        for context in contexts:
            self._leases.touch(context, self._clock.now())
        saving = Saving(image, image.blocks(self.block_size), pins, _owners(image))
        if not with_kv:
            self.end(saving)
        return saving

    def read(self, saving: Saving, first: int, last: int) -> Parts:
        """Copies the KV of the image's blocks [first, last) to the host.

        Raises:
            ContextBusy: It has left the device meanwhile, against all odds.
        """
        assert self.porter is not None
        chosen = saving.blocks[first:last]
        tables: dict[int, dict[int, int]] = {}
        block_ids = []
        for stored in chosen:
            owner = saving.owners[stored.node]
            if owner not in tables:
                tables[owner] = self._table(saving.pins[owner])
            if stored.number not in tables[owner]:
                raise ContextBusy("The contexts are being moved; save them again.")
            block_ids.append(tables[owner][stored.number])
        return self.porter.read(block_ids, [stored.used for stored in chosen])

    def end(self, saving: Saving) -> None:
        """Lets go of what is saved. Ending twice is fine."""
        self._clock.tick()
        pins, saving.pins = saving.pins, []
        for pin in pins:
            self._store.release(pin)

    def abandon(self, planting: Planting) -> None:
        """Lets go of what is being restored. Abandoning what is finished does nothing."""
        self._clock.tick()
        planting.abandon()

    # -- restore -----------------------------------------------------------------------------

    def check(self, image: TreeImage) -> None:
        """Makes sure that these tokens can be a context's here.

        Raises:
            InvalidRequest: A token id beyond the vocabulary, or a context that is too long.
        """
        longest = max((node.end for node in image.nodes), default=0)
        if longest > self._facts.max_length:
            raise InvalidRequest(
                f"The snapshot has a context of {longest} tokens, and the longest here is "
                f"{self._facts.max_length}.",
                reason=Reason.CONTEXT_TOO_LONG,
                metadata={"length": longest, "max_length": self._facts.max_length},
            )
        if any(max(node.tokens) >= self._facts.vocab_size for node in image.nodes):
            raise InvalidRequest(
                f"The snapshot has token ids that are not in [0, {self._facts.vocab_size}).",
                reason=Reason.TOKEN_OUT_OF_RANGE,
            )

    def plant(self, tenant: str, image: TreeImage) -> Planting:
        """Begins to restore an image that was checked.

        Raises:
            PoolExhausted: The tenant may not have so many contexts.
        """
        self._clock.tick()
        self._store.require_room(tenant, len(image.contexts), 0)
        return Planting(self._store, tenant, image)

    def write(self, planting: Planting, first: int, last: int, parts: Parts) -> None:
        """Gives the image's blocks [first, last) blocks of the pool, as far as there is room."""
        assert self.porter is not None
        self._clock.tick()
        fills = planting.reserve(first, last)
        if fills:
            rows = [fill.number - first for fill in fills]
            self.porter.write([fill.block_id for fill in fills], rows, parts)
        planting.commit(fills)

    def finish(self, planting: Planting, terms: LeaseTerms | None) -> tuple[ContextView, ...]:
        """Makes the restored contexts, ancestors first; all or none.

        Args:
            planting: What was planted; ended by this, whatever comes of it.
            terms: The lease of each; None gives each the one it had, as far as allowed here.

        Raises:
            InvalidRequest: The time is one that no lease can have.
            PoolExhausted: A limit on contexts, depth or pins.
        """
        self._clock.tick()
        now, made = self._clock.now(), list[Context]()
        try:
            leases = [
                self._leases.propose(
                    terms or LeaseTerms(saved.lease_mode, saved.lease_ttl or None, may_reduce=True)
                )
                for saved in planting.image.contexts
            ]
            made = planting.finish(leases, now)
            self._leases.check_pins(made, may_reduce=terms is None or terms.may_reduce)
        except AgentKVError:
            planting.abandon()
            for context in reversed(made):
                self._store.release(context)
            raise
        for context in made:
            self._leases.admit(context, now)
        return tuple(self._observer.view(context) for context in made)

    def _table(self, pin: Context) -> dict[int, int]:
        """Lists the blocks on a pin's path that are computed, by their numbers."""
        table = {}
        for segment in self._store.tree.path(pin.tail):
            first = segment.start // self.block_size
            table.update({first + place: id for place, id in enumerate(segment.blocks)})
        return table


def _owners(image: TreeImage) -> list[int]:
    """Finds, for each run, a context whose path it lies on."""
    owners = [ROOT] * len(image.nodes)
    for number, context in enumerate(image.contexts):
        node = context.node
        while node != ROOT and owners[node] == ROOT:
            owners[node] = number
            node = image.nodes[node].parent
    return owners
