"""Blocks that several sequences of one request share: parallel samples, and beams.

Owns how each is played with the engine's verbs, and the paper's measure: blocks saved by sharing
over blocks without, mean over the steps. There is no model, so who descends from whom in a beam
search is drawn: each new beam continues one of the old ones, all equally likely.
"""

import random

from agentkv.engine.engine import Engine
from agentkv.sampling_params import SamplingParams
from benchmarks.evaluation.policies import blocks_for
from benchmarks.hollow_runner import BLOCK_SIZE, VOCAB_SIZE, HollowRunner, hollow_engine

TENANT = "decoding"


def saved_by_samples(num_in: int, num_out: int, num_samples: int) -> float:
    """Share of blocks that parallel samples of one prompt save, mean over the steps."""
    engine, parent = _prompt(num_in, num_out, num_samples)
    params = SamplingParams(max_tokens=num_out)
    generation = engine.inference.generate_branches(TENANT, parent, num_samples, params)
    engine.contexts.release(TENANT, [parent])
    shares = []
    length = num_in
    while not generation.is_done:
        engine.step()
        length += 1
        shares.append(_saved(engine, num_samples, length - 1))  # the last token has no KV yet
    return sum(shares) / len(shares)


def saved_by_beams(num_in: int, num_out: int, width: int, seed: int) -> float:
    """Share of blocks that the beams of one search save, mean over the steps."""
    source = random.Random(seed)
    engine, parent = _prompt(num_in, num_out, width)
    beams = [parent]
    shares = []
    for step in range(num_out):
        chosen = [source.choice(beams) for _ in range(width)]
        children = [engine.contexts.fork(TENANT, beam)[0].id for beam in chosen]
        engine.contexts.release(TENANT, beams)
        extensions = [
            engine.contexts.extend(TENANT, child, [source.randrange(VOCAB_SIZE)])
            for child in children
        ]
        for extension in extensions:
            engine.run(extension)
        beams = children
        shares.append(_saved(engine, width, num_in + step + 1))
    return sum(shares) / len(shares)


def _prompt(num_in: int, num_out: int, width: int) -> tuple[Engine, str]:
    num_blocks = 2 * (width + 1) * blocks_for(num_in + num_out + 1, BLOCK_SIZE)
    engine = hollow_engine(
        HollowRunner(),
        num_blocks=num_blocks,
        max_length=num_in + num_out + 1,
        max_depth=num_out + 1,
    )
    tokens = [place % VOCAB_SIZE for place in range(num_in)]
    return engine, engine.run(engine.contexts.create(TENANT, tokens)).answer.context.id


def _saved(engine: Engine, num_sequences: int, length: int) -> float:
    alone = num_sequences * blocks_for(length, BLOCK_SIZE)
    return 1 - engine.observer.pool().live / alone
