"""The embedded model once: branches of a real conversation equal plain transformers."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from agentkv.config import EngineConfig
from agentkv.engine.build import build_engine_for
from agentkv.engine.conversation import ChatMessage
from agentkv.engine.engine import Engine
from agentkv.engine.operations import Generation
from agentkv.engine.outputs import Chunk
from agentkv.model.attention import use_agentkv_attention
from agentkv.model.loader import LoadedModel, load_model
from agentkv.sampling_params import SamplingParams

pytestmark = pytest.mark.slow

TENANT = "tenant"
TOLERANCE = 1e-3
"""Of log-probabilities; thirty layers in fp32 add up more rounding than two."""
GREEDY = SamplingParams(max_tokens=12, logprobs=True)


class Loaded(NamedTuple):
    """The model, and an engine on it."""

    model: LoadedModel
    engine: Engine

    def logits(self, token_ids: Sequence[int]) -> Tensor:
        """Logits after each token by plain transformers, (n, vocab_size)."""
        model = self.model.model
        model.set_attn_implementation("sdpa")
        with torch.inference_mode():
            logits: Tensor = model(torch.tensor([list(token_ids)]), use_cache=False).logits[0]
        use_agentkv_attention(model)
        return logits

    def create(self, text: str) -> tuple[str, list[int]]:
        """Creates a context of one user message."""
        token_ids = self.engine.tokenizer.encode_chat([ChatMessage("user", text)])
        answer = self.engine.run(self.engine.contexts.create(TENANT, token_ids)).answer
        return answer.context.id, token_ids


@pytest.fixture(scope="module")
def loaded() -> Iterator[Loaded]:
    model = load_model("smollm2", dtype="float32")
    made = Loaded(model, build_engine_for(model, EngineConfig(num_blocks=64, weights="fp32")))
    yield made
    made.engine.check()


def chunk_of(operation: Generation) -> Chunk:
    (chunk,) = (update for update in operation.take_news() if isinstance(update, Chunk))
    return chunk


def test_four_branches_equal_plain_transformers(loaded: Loaded) -> None:
    """Catches a branch of a real model that differs from its own tokens run alone."""
    engine = loaded.engine
    root, prompt = loaded.create("Name three rivers of France, and the sea each flows into.")
    cut = len(prompt) - 5
    assert cut % 16 and len(prompt) % 16, "the forks are to cut blocks"
    heads = engine.contexts.fork(TENANT, root, count=2)
    earlier = engine.contexts.fork(TENANT, root, at=cut, count=2)
    extensions = {heads[1].id: " The", earlier[0].id: " Name seas too.", earlier[1].id: " In verse"}
    tokens = {view.id: prompt[: view.length] for view in (*heads, *earlier)}
    for context_id, text in extensions.items():
        token_ids = engine.tokenizer.encode(text)
        engine.run(engine.contexts.extend(TENANT, context_id, token_ids))
        tokens[context_id] += token_ids
    generations = {name: engine.inference.generate(TENANT, name, GREEDY) for name in tokens}
    for context_id, operation in generations.items():
        chunk = chunk_of(engine.run(operation))
        before = tokens[context_id]
        logits = loaded.logits([*before, *chunk.token_ids])[len(before) - 1 : -1]
        expected = logits.log_softmax(dim=-1).amax(dim=-1)
        assert list(chunk.token_ids) == logits.argmax(dim=-1).tolist()
        torch.testing.assert_close(torch.tensor(chunk.logprobs), expected, rtol=0, atol=TOLERANCE)


def test_scores_equal_plain_transformers(loaded: Loaded) -> None:
    """Catches scores that are off by a token, or read a sibling's KV."""
    engine = loaded.engine
    root, prompt = loaded.create("What is the capital of France?")
    continuations = [
        engine.tokenizer.encode(text) for text in (" Paris is it.", " London", " a b c")
    ]
    scores = engine.run(engine.inference.score(TENANT, root, continuations)).answer.scores
    for token_ids, score in zip(continuations, scores, strict=True):
        rows = loaded.logits([*prompt, *token_ids])[len(prompt) - 1 : -1].log_softmax(dim=-1)
        expected = rows[torch.arange(len(token_ids)), torch.tensor(token_ids)]
        torch.testing.assert_close(torch.tensor(score.logprobs), expected, rtol=0, atol=TOLERANCE)


def test_a_seed_holds_in_any_batch(loaded: Loaded) -> None:
    """Catches draws of a real vocabulary that depend on the neighbours."""
    engine = loaded.engine
    root, _ = loaded.create("Write a line about rain.")
    params = SamplingParams(max_tokens=16, temperature=0.8, top_p=0.95, seed=42)
    seen = []
    for num_neighbours in (0, 3):
        (child,) = engine.contexts.fork(TENANT, root)
        neighbours = (
            engine.contexts.fork(TENANT, root, count=num_neighbours) if num_neighbours else ()
        )
        free = SamplingParams(max_tokens=20, temperature=1.0)
        others = [engine.inference.generate(TENANT, view.id, free) for view in neighbours]
        seen.append(
            chunk_of(engine.run(engine.inference.generate(TENANT, child.id, params))).token_ids
        )
        for other in others:
            engine.cancel(other)
    assert seen[0] == seen[1]
