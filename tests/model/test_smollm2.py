"""The embedded default, from the GGUF file of its package: slow, and the only test with it here."""

from typing import Any

import pytest
import torch

from agentkv.engine.conversation import ChatMessage
from agentkv.engine.tokenizer import Tokenizer
from agentkv.model.loader import LoadedModel, load_model


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        return load_model("smollm2")


@pytest.mark.slow
def test_smollm2_is_whole(smollm2: LoadedModel) -> None:
    """Catches a conversion that loads and is a little wrong: the facts are the published ones."""
    assert smollm2.architecture == "LlamaForCausalLM"
    assert (smollm2.vocab_size, smollm2.max_length, smollm2.num_layers) == (49_152, 8192, 30)
    assert smollm2.eos_token_ids == (2,)
    assert smollm2.weight_bytes == 4 * 134_515_008
    assert smollm2.model.config.rms_norm_eps == 1e-5


@pytest.mark.slow
def test_smollm2_splits_text_as_in_training(smollm2: LoadedModel) -> None:
    """Catches another splitting of text: single digits, bytes kept, the template's own turns."""
    tokenizer = Tokenizer(smollm2.tokenizer)
    for text in (
        "In 2024: 3.14159",
        "def f(x):\n\treturn x",
        "漢字 😀 été",
        "<|im_end|>",
        "  a\n\n b",
    ):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert [tokenizer.decode([token]) for token in tokenizer.encode("x 1234")] == [
        "x", " ", "1", "2", "3", "4",
    ]  # fmt: skip
    ids = tokenizer.encode_chat([ChatMessage("user", "hi")])
    assert tokenizer.decode(ids, skip_control=False) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
        "<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )
    own = tokenizer.encode_chat([ChatMessage("system", "S"), ChatMessage("user", "hi")])
    assert tokenizer.decode(own, skip_control=False).startswith("<|im_start|>system\nS<|im_end|>")


@pytest.mark.slow
def test_smollm2_knows_the_capital_of_france(smollm2: LoadedModel) -> None:
    """Catches reordered heads: such a model still loads, and babbles."""
    tokenizer = Tokenizer(smollm2.tokenizer)
    ids = tokenizer.encode("The capital of France is")
    model: Any = smollm2.model
    with torch.inference_mode():
        logits = model(torch.tensor([ids])).logits[0, -1]
    assert tokenizer.decode([int(logits.argmax())]) == " Paris"
