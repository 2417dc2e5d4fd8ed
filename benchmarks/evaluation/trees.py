"""Published search trees, built in a real engine: blocks with and without sharing.

Owns the shapes, as their authors publish them, and how one is built: a context per node, forked
from its parent's head, then extended. There is no model.
"""

from typing import NamedTuple

from agentkv.sampling_params import SamplingParams
from benchmarks.evaluation.policies import blocks_for
from benchmarks.hollow_runner import BLOCK_SIZE, VOCAB_SIZE, HollowRunner, hollow_engine

TENANT = "trees"


class Shape(NamedTuple):
    """A tree by levels: so many nodes, each so many tokens long; children are spread evenly."""

    name: str
    nodes: tuple[int, ...]
    tokens: tuple[int, ...]

    @property
    def num_distinct(self) -> int:
        """Tokens, each counted once."""
        return sum(count * size for count, size in zip(self.nodes, self.tokens, strict=True))

    @property
    def blocks_alone(self) -> int:
        """Blocks if each leaf had all its path to itself."""
        return self.nodes[-1] * blocks_for(sum(self.tokens), BLOCK_SIZE)

    @property
    def tail(self) -> int:
        """Tokens that a cache of whole blocks runs again, at all forks together."""
        start = again = 0
        for count, size in zip(self.nodes, self.tokens, strict=True):
            again += count * (start % BLOCK_SIZE)
            start += size
        return again


class Built(NamedTuple):
    """What a tree took."""

    blocks_held: int
    num_recomputed: int
    """Tokens run beyond the distinct ones."""


def _shape(source: str, text: str) -> Shape:
    """Reads `1,2,64 _ 8,256,32`: nodes per level, and tokens of a node of that level."""
    nodes, tokens = (tuple(map(int, part.split(","))) for part in text.split(" _ "))
    return Shape(f"{source} {text}", nodes, tokens)


FAST_TREE = tuple(
    _shape("FastTree", text)
    for text in (
        "1,2,64 _ 8,256,32",
        "1,4,256 _ 8,256,32",
        "1,4,8,256 _ 8,256,256,32",
        "1,256 _ 256,32",
        "1,1024 _ 2048,32",
        "1,16,64 _ 1024,256,32",
        "1,4,16,512 _ 1024,256,128,32",
        "1,4,16,64,256,1024 _ 256,8,256,64,32,256",
        "1,10 _ 4000,400",
        "1,2,4,8,16,32,64,128,1024 _ 16,16,16,16,16,16,16,16,16",
        "1,2,4,8,16,32,64,128,1024 _ 256,128,64,16,16,16,16,16,16",
        "1,8,16,32,64,128,1024 _ 256,128,64,16,16,16,16",
        "1,16,32,64,128,1024 _ 256,128,64,16,16,16",
    )
)
OTHERS = (
    _shape("DeFT few-shot", "1,20 _ 4000,400"),
    _shape("DeFT few-shot", "1,50 _ 4000,400"),
    _shape("Hydragen", "1,1024 _ 1024,128"),
    _shape("Parrot", "1,64 _ 8192,20"),
    _shape("RolloutKV", "1,8 _ 8192,128"),
    _shape("SGLang tree of thoughts", "1,3,9,27 _ 150,316,316,316"),
    _shape("Pie tree of thoughts", "1,2,4,8 _ 100,124,124,124"),
    _shape("PAT", "1,2,64 _ 1024,256,256"),
    _shape("PAT", "1,8,512 _ 32,512,256"),
    _shape("PAT", "1,4,16,64,256,1024 _ 256,32,256,64,32,256"),
    _shape("PAT, nothing shared,", "256 _ 1024"),
)
"""Roots of the two trees of thoughts, and 60 tokens of prompt per node, are assumed."""


def build(shape: Shape) -> Built:
    """Builds a tree, and counts what its contexts hold."""
    num_blocks = sum(
        count * (blocks_for(size, BLOCK_SIZE) + 2)
        for count, size in zip(shape.nodes, shape.tokens, strict=True)
    )
    engine = hollow_engine(HollowRunner(), num_blocks=num_blocks, max_length=sum(shape.tokens) + 1)
    first = [[(node * 7 + place) % VOCAB_SIZE for place in range(shape.tokens[0])]
             for node in range(shape.nodes[0])]  # fmt: skip
    level = [
        engine.run(engine.contexts.create(TENANT, tokens)).answer.context.id for tokens in first
    ]
    for count, size in zip(shape.nodes[1:], shape.tokens[1:], strict=True):
        parents, level = level, []
        for node in range(count):
            parent = parents[node * len(parents) // count]
            child = engine.contexts.fork(TENANT, parent)[0].id
            tokens = [(node * 13 + place * 5) % VOCAB_SIZE for place in range(size)]
            engine.run(engine.contexts.extend(TENANT, child, tokens))
            level.append(child)
    held = engine.observer.pool().live
    return Built(held, engine.view().computed_tokens - shape.num_distinct)


def recomputed_after_fork(length: int, at: int) -> int:
    """Counts the tokens that a first token costs after a fork at a position."""
    engine = hollow_engine(HollowRunner(), num_blocks=length, max_length=2 * length)
    tokens = [place % VOCAB_SIZE for place in range(length)]
    parent = engine.run(engine.contexts.create(TENANT, tokens)).answer.context.id
    before = engine.view().computed_tokens
    child = engine.contexts.fork(TENANT, parent, at=at)[0].id
    engine.run(engine.inference.generate(TENANT, child, SamplingParams(max_tokens=1)))
    return engine.view().computed_tokens - before
