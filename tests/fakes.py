"""A model without tensors: simulated KV, tokens that follow from tokens, faults on order.

`FakeModelRunner` keeps for every slot what a real model would have put there, and reads it back
exactly as the attention contract says, so a wrong block, a stale slot or a missing copy is found
in the step that reads it. It knows nothing of contexts or requests. `make_engine` puts an engine
on it. Nothing here needs torch.
"""

import itertools
import sys
import zlib
from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import tokenizers
from transformers import PreTrainedTokenizerFast

from agentkv.config import (
    LeaseConfig,
    LimitsConfig,
    PoolConfig,
    PressureConfig,
    QuotasConfig,
    SchedulerConfig,
)
from agentkv.core.batch import (
    NO_SLOT,
    Batch,
    BlockCopy,
    Run,
    Sample,
    Sampled,
    StepResult,
    Stream,
)
from agentkv.core.block_move import BlockMove, Place, Tier
from agentkv.core.block_pool import BlockPool
from agentkv.core.drafter import Propose, look_up
from agentkv.engine.engine import Engine
from agentkv.engine.outputs import ModelFacts
from agentkv.engine.tokenizer import Tokenizer

VOCAB_SIZE = 1000


class ContractBroken(BaseException):
    """A batch that no correct runner could compute.

    Not an `Exception`: the engine's loop survives those, and must not survive this one.
    """


class Kv(NamedTuple):
    """What a slot holds: the KV of a token depends on all tokens before it, hence the digest."""

    token: int
    position: int
    digest: int


class Head(NamedTuple):
    """Logits after some tokens: opaque to all but this module."""

    digest: int


def digest(tokens: Sequence[int], start: int = 0) -> int:
    """Folds tokens into 32 bits; to go on with more of them, pass the digest so far as `start`."""
    return zlib.crc32(array("I", tokens).tobytes(), start)


def digest_one(token: int, start: int) -> int:
    """The same for one token, which is what the inner loops need."""
    return zlib.crc32(token.to_bytes(4, sys.byteorder), start)


def next_token(tokens: Sequence[int], stream: Stream | None = None) -> int:
    """The model: the token after these, drawn from a stream if one is given, else greedy."""
    return _choose(digest(tokens), len(tokens), stream)


def logprob(tokens: Sequence[int], token: int) -> float:
    """The model: the log-probability of a token after these, in [-10, 0)."""
    return _logprob(digest(tokens), token)


def continuation(tokens: Sequence[int], count: int, stream: Stream | None = None) -> list[int]:
    """Generates `count` tokens from scratch: the cold run that branches are compared with."""
    path = list(tokens)
    for _ in range(count):
        path.append(next_token(path, stream))
    return path[len(tokens) :]


def mostly_right(tokens: "array[int]", limit: int) -> list[int]:
    """Guesses what the model says greedily, but for a token here and there."""
    guesses = continuation(tokens, limit)
    return [guess if guess % 4 else guess + 1 for guess in guesses]


def _choose(folded: int, position: int, stream: Stream | None) -> int:
    if stream is not None:
        folded = zlib.crc32(f"{stream.seed} {stream.ordinal} {position}".encode(), folded)
    return folded % VOCAB_SIZE


def _logprob(folded: int, token: int) -> float:
    return -(1 + digest_one(token, folded) % 1000) / 100


class FakeModelRunner:
    """Computes steps on simulated KV.

    Raises `ContractBroken` when a row does not find every position below and at its own exactly
    once, with the KV of its own path; when a block is written that others count on; when copies
    could not be done in any order.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.slots: list[Kv | None] = [None] * (num_blocks * block_size)
        """By slot; None is poison: never written, or given back to the pool."""
        self.batches: list[Batch] = []
        """Every batch it was given, failed ones included."""
        self.pool: BlockPool | None = None
        """Lets it see which blocks may be written; None takes every write."""
        self.forced: dict[int, list[int]] = {}
        """Tokens to choose instead of the model's, by the stream's ordinal; used up in order."""
        self.non_finite: Callable[[Sample], bool] = lambda sample: False
        """Tells the samples whose logits are not finite."""
        self.before_step: Callable[[Batch], None] = lambda batch: None
        """Called before anything is computed; may raise, as a failing device would."""
        self.after_writes: Callable[[Batch], None] = lambda batch: None
        """Called once KV is written; may raise, as a device that fails half-way would."""
        self.places: dict[Place, tuple[Kv | None, ...]] = {}
        """Content of blocks of the lower tiers."""
        self.moves: list[BlockMove] = []
        """Every move it was given, failed ones included."""
        self.loses: Callable[[BlockMove], bool] = lambda move: False
        """Tells the moves that fail, as a bad checksum would make them."""
        self.fetching: list[Place] = []
        """Disk blocks being read ahead."""
        self.reads_at_once: Callable[[Place], bool] = lambda place: True
        """Tells whose reading ends by the next step, rather than once somebody waits for it."""

    def run(self, batch: Batch, meanwhile: Callable[[], None] = lambda: None) -> StepResult:
        """Copies, writes, reads and answers, in that order."""
        meanwhile()
        self.batches.append(batch)
        self.before_step(batch)
        self._copy(batch.copies)
        self._write(batch)
        digests = self._read(batch)
        self.after_writes(batch)

        def folded(row: int | None, head: object) -> int:
            if row is not None:
                return digests[row]
            _require(isinstance(head, Head), "neither a row nor logits")
            assert isinstance(head, Head)
            return head.digest

        return StepResult(
            tuple(
                self._sample(sample, folded(sample.row, sample.head)) for sample in batch.samples
            ),
            tuple(Head(digests[row]) for row in batch.heads),
            tuple(_logprob(folded(s.row, s.head), s.token) for s in batch.scores),
        )

    def move(self, moves: Sequence[BlockMove]) -> Sequence[BlockMove]:
        """Carries KV between tiers, in order; what fails is torn."""
        failed, torn = [], set[Place]()
        for move in moves:
            self.moves.append(move)
            src, dst = move
            content = self.block(src.block_id) if src.tier is Tier.DEVICE else self.places[src]
            torn.discard(dst)
            if self.loses(move) or src in torn:
                failed.append(move)
                torn.add(dst)
                content = (None,) * self.block_size
            if dst.tier is Tier.DEVICE:
                first = dst.block_id * self.block_size
                self.slots[first : first + self.block_size] = content
            else:
                self.places[dst] = content
        return failed

    def fetch(self, places: Sequence[Place]) -> None:
        """Notes what is to be read ahead."""
        self.fetching += places

    def fetched(self, wait: float) -> Sequence[Place]:
        """Ends reading what the hook lets through; a real disk would be waited for."""
        done = [place for place in self.fetching if wait or self.reads_at_once(place)]
        self.fetching = [place for place in self.fetching if place not in done]
        return done

    def close(self) -> None:
        """There is nothing to give back."""

    def block(self, block_id: int) -> tuple[Kv | None, ...]:
        """The content of a block."""
        first = block_id * self.block_size
        return tuple(self.slots[first : first + self.block_size])

    def poison(self, block_ids: Sequence[int]) -> None:
        """Overwrites blocks, so that whoever still reads them is found out."""
        for block_id in block_ids:
            first = block_id * self.block_size
            self.slots[first : first + self.block_size] = [None] * self.block_size

    def _copy(self, copies: Sequence[BlockCopy]) -> None:
        sources = {copy.src_block_id for copy in copies}
        targets = [copy.dst_block_id for copy in copies]
        _require(len(set(targets)) == len(targets), "two copies into one block")
        _require(sources.isdisjoint(targets), "a block is source and target of copies at once")
        for src, dst, num_tokens in copies:
            self._require_writable(dst)
            first, target = src * self.block_size, dst * self.block_size
            copied = self.slots[first : first + num_tokens]
            _require(0 < num_tokens < self.block_size, "a copy of nothing, or of a whole block")
            _require(None not in copied, "a copy of poison")
            self.slots[target : target + num_tokens] = copied

    def _write(self, batch: Batch) -> None:
        written = [slot for slot in batch.slots if slot != NO_SLOT]
        _require(len(set(written)) == len(written), "two rows write one slot")
        for token, position, slot in zip(
            batch.token_ids, batch.positions, batch.slots, strict=True
        ):
            if slot != NO_SLOT:
                self._require_writable(slot // self.block_size)
                _require(slot % self.block_size == position % self.block_size, "misaligned")
                self.slots[slot] = Kv(token, position, -1)  # completed once the row was read

    def _read(self, batch: Batch) -> list[int]:
        """Reads the whole context of each row; returns the digest of its tokens, by row."""
        digests: list[int] = []
        written = set(batch.slots)
        for rows, runs in _groups(batch):
            folded, last = 0, batch.positions[rows[-1]]
            found = []
            for position, slot in self._visible(runs, last):
                kv = self.slots[slot]
                if kv is None or kv.position != position:
                    raise ContractBroken(f"{kv} where position {position} should be")
                folded = digest_one(kv.token, folded)
                if slot in written:
                    self.slots[slot] = kv._replace(digest=folded)
                elif kv.digest != folded:
                    raise ContractBroken(f"{kv} belongs to other tokens")
                found.append((kv.token, folded))
            for row in rows:
                token, folded = found[batch.positions[row]]
                _require(token == batch.token_ids[row], "a row does not read its own token")
                digests.append(folded)
        return digests

    def _visible(self, runs: Sequence[Run], last: int) -> list[tuple[int, int]]:
        """The (position, slot) pairs that a row at `last` reads; those of earlier rows first."""
        size = self.block_size
        pairs = sorted(
            (position, run.block_ids[position // size - run.start // size] * size + position % size)
            for run in runs
            for position in range(run.start, min(run.end, last + 1))
        )
        _require([p for p, _ in pairs] == list(range(last + 1)), "a position is missing or double")
        return pairs

    def _sample(self, sample: Sample, folded: int) -> Sampled:
        if self.non_finite(sample):
            return Sampled(0, None, failed=True)
        stream = None if sample.params.is_greedy else sample.stream
        token = _choose(folded, sample.position, stream)
        if self.forced.get(sample.stream.ordinal):
            token = self.forced[sample.stream.ordinal].pop(0)
        return Sampled(token, _logprob(folded, token) if sample.params.logprobs else None)

    def _require_writable(self, block_id: int) -> None:
        if self.pool is not None:
            _require(self.pool.count(block_id) == 1, f"block {block_id} is shared, and written")


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise ContractBroken(message)


def _groups(batch: Batch) -> Iterator[tuple[list[int], list[Run]]]:
    """Groups rows at consecutive positions that are listed by the same runs."""
    rows: list[int] = []
    runs: list[Run] = []
    for row in range(batch.num_rows):
        listing = [run for run in batch.runs if 0 <= row - run.first_row < run.num_rows]
        follows = rows and batch.positions[row] == batch.positions[rows[-1]] + 1
        if rows and not (follows and listing == runs):
            yield rows, runs
            rows = []
        rows, runs = [*rows, row], listing
    if rows:
        yield rows, runs


def make_tokenizer(pieces: Sequence[str] = ()) -> Tokenizer:
    """Builds a tokenizer whose first ids stand for these texts, the rest for their numbers."""
    texts = [*pieces, *(f" {number}" for number in range(len(pieces), VOCAB_SIZE))]
    vocabulary = {text: number for number, text in enumerate(texts)}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token=texts[-1]))
    backend.decoder = tokenizers.decoders.Fuse()
    untyped: Any = PreTrainedTokenizerFast
    return Tokenizer(untyped(tokenizer_object=backend))


def make_engine(
    runner: FakeModelRunner | None = None,
    *,
    num_blocks: int = 256,
    block_size: int = 16,
    host_blocks: int = 0,
    disk_blocks: int = 0,
    max_length: int = 4096,
    scheduler: SchedulerConfig | None = None,
    limits: LimitsConfig | None = None,
    leases: LeaseConfig | None = None,
    pressure: PressureConfig | None = None,
    quotas: QuotasConfig | None = None,
    end_token_ids: Sequence[int] = (),
    pieces: Sequence[str] = (),
    tokenizer: Tokenizer | None = None,
    clock: Callable[[], float] = lambda: 1000.0,
    timer: Callable[[], float] = lambda: 1000.0,
    propose: Propose = look_up,
) -> Engine:
    """Puts an engine on a fake model: ids are c0, c1, ..., seeds 1, 2, ..., and time stands still.

    Args:
        runner: The fake to use; one of the pool's size is made if None.
        num_blocks: Blocks of the pool.
        block_size: Token positions per block.
        host_blocks: Blocks of the host tier.
        disk_blocks: Blocks of the disk tier.
        max_length: Longest context of the model.
        scheduler: Step sizes; the defaults if None.
        limits: Tenant limits; the defaults if None.
        leases: What leases may be; by default, all blocks may be pinned.
        pressure: When the pool counts as full.
        quotas: Tenant quotas; none if None.
        end_token_ids: The model's ends of sequence.
        pieces: Texts of the first token ids.
        tokenizer: One made earlier, to save time; else one is made from `pieces`.
        clock: Seconds since the epoch.
        timer: Seconds that only grow, for the bills.
        propose: Where drafts come from.
    """
    numbers, seeds = itertools.count(), itertools.count(1)
    runner = runner or FakeModelRunner(num_blocks, block_size)
    facts = ModelFacts(
        name="fake",
        architecture="FakeForCausalLM",
        vocab_size=VOCAB_SIZE,
        max_length=max_length,
        num_layers=1,
        dtype="none",
        bytes_per_block=block_size,
        has_chat_template=False,
    )
    engine = Engine(
        runner,
        facts,
        tokenizer or make_tokenizer(pieces),
        pool=PoolConfig(
            num_blocks=num_blocks,
            block_size=block_size,
            host_blocks=host_blocks,
            disk_blocks=disk_blocks,
        ),
        scheduler=scheduler or SchedulerConfig(),
        limits=limits or LimitsConfig(),
        leases=leases or LeaseConfig(pin_quota=1.0),
        pressure=pressure or PressureConfig(),
        quotas=quotas,
        end_token_ids=frozenset(end_token_ids),
        new_id=lambda: f"c{next(numbers)}",
        new_seed=lambda: next(seeds),
        clock=clock,
        mover=runner,
        timer=timer,
        propose=propose,
    )
    runner.pool = engine._tree.pool
    return engine
