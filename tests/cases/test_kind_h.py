"""Case of kind H: what a branch counts for its penalties is its own.

Others of the kind are tests of the sampler, of seeds and of the detokenizer.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import torch
from slow_twin import TENANT, PlainModel
from tiny_engines import TinyEngine
from tiny_models import VOCAB_SIZE, build_tiny_model

from agentkv.engine.operations import Generation
from agentkv.engine.outputs import Chunk
from agentkv.sampling_params import SamplingParams

PROMPTS = [[(11 * i + 5 * seed + i * i) % VOCAB_SIZE for i in range(14)] for seed in (1, 2)]
PENALTIES: dict[str, Any] = {
    "repetition_penalty": 1.5,
    "presence_penalty": 0.2,
    "frequency_penalty": 0.4,
}


@cache
def plain() -> PlainModel:
    return PlainModel.of("llama")


def expected(prompt: Sequence[int], params: SamplingParams) -> list[int]:
    """Greedy decoding by the plain model, counts made anew for every token."""
    tokens, generated = list(prompt), list[int]()
    for _ in range(params.max_tokens):
        logits = plain().logits(tokens)[-1]
        counted = tokens if params.penalize_prompt else generated
        counts = torch.bincount(torch.tensor(counted, dtype=torch.int64), minlength=VOCAB_SIZE)
        penalty = params.repetition_penalty
        reduced = torch.where(logits < 0, logits * penalty, logits / penalty)
        logits = torch.where(counts > 0, reduced - params.presence_penalty, logits)
        token = int((logits - params.frequency_penalty * counts).argmax())
        tokens.append(token)
        generated.append(token)
    return generated


def tokens_of(operation: Generation) -> list[list[int]]:
    branches: dict[int, list[int]] = {}
    for update in operation.take_news():
        if isinstance(update, Chunk):
            branches.setdefault(update.branch, []).extend(update.token_ids)
    return [branches[number] for number in sorted(branches)]


@pytest.mark.parametrize("penalize_prompt", [False, True])
@pytest.mark.parametrize("num_blocks", [64, 13])
def test_case_065_penalty_counts_are_a_branchs_own(num_blocks: int, penalize_prompt: bool) -> None:
    """Catches counts that siblings share, that a call leaves behind, or that preemption doubles."""
    made = TinyEngine(build_tiny_model("llama"), num_blocks=num_blocks)
    engine = made.engine
    params = SamplingParams(max_tokens=12, penalize_prompt=penalize_prompt, **PENALTIES)
    plainly = SamplingParams(max_tokens=12)
    roots = [engine.run(engine.contexts.create(TENANT, p)).answer.context.id for p in PROMPTS]
    children = [engine.contexts.fork(TENANT, root)[0].id for root in roots]
    running = [
        engine.inference.generate(TENANT, context_id, options)
        for context_id, options in zip(
            (*roots, *children), (params, plainly, plainly, params), strict=True
        )
    ]
    for operation in running:
        engine.run(operation)
    found = [tokens for operation in running for tokens in tokens_of(operation)]
    assert found[0] == expected(PROMPTS[0], params)
    assert found[1] == expected(PROMPTS[1], plainly)
    assert found[2] == expected(PROMPTS[0], plainly)
    assert found[3] == expected(PROMPTS[1], params)
    assert (engine.view().num_preemptions > 0) == (num_blocks == 13)

    # A second call counts what it generates itself; a fork of a truncated context likewise.
    engine.contexts.truncate(TENANT, roots[0], len(PROMPTS[0]) + 5)
    (child,) = engine.contexts.fork(TENANT, roots[0])
    before = [*PROMPTS[0], *found[0][:5]]
    second = engine.run(engine.inference.generate(TENANT, child.id, params))
    assert tokens_of(second) == [expected(before, params)]
    branches = engine.run(engine.inference.generate_branches(TENANT, roots[0], 3, params))
    assert tokens_of(branches) == [expected(before, params)] * 3
    engine.check()
