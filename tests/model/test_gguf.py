"""GGUF files become folders that transformers loads, weight for weight."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tiny_gguf import Q4_1, Q8_0, TinyGguf, build_llama, gguf_tensors, gguf_tokens
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from agentkv.errors import InvalidRequest, UnsupportedModelError
from agentkv.model import gguf as converter
from agentkv.model.gguf import convert_gguf, find_converted


def silent(_: str) -> None:
    pass


def convert(tiny: TinyGguf, folder: Path) -> Path:
    path = tiny.write(folder / "tiny.gguf")
    return convert_gguf(path, cache_root=folder / "cache", report=silent)


def logits_of(model: Any) -> torch.Tensor:
    ids = torch.arange(3, 60)[None]
    with torch.inference_mode():
        logits: torch.Tensor = model(ids).logits
    return logits


def load(folder: Path) -> Any:
    factory: Any = AutoModelForCausalLM
    return factory.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.mark.parametrize("tied", [True, False])
def test_a_float_file_gives_the_model_back_exactly(tmp_path: Path, tied: bool) -> None:
    """Catches rows of query and key left as llama.cpp ordered them: the model would babble."""
    model = build_llama(tie_word_embeddings=tied)
    folder = convert(TinyGguf(model), tmp_path)
    weights = load_file(folder / "model.safetensors")
    original = model.state_dict()
    if tied:
        original.pop("lm_head.weight")
    assert set(weights) == set(original)
    assert all(torch.equal(weights[name], original[name]) for name in weights)
    assert torch.equal(logits_of(load(folder)), logits_of(model))


@pytest.mark.parametrize("kind", [Q8_0, Q4_1])
def test_a_quantised_file_gives_its_exact_values(tmp_path: Path, kind: Any) -> None:
    """Catches scales or blocks read wrongly, and rows reordered before they are dequantised."""
    model = build_llama()
    folder = convert(TinyGguf(model, kind=kind), tmp_path)
    weights = load_file(folder / "model.safetensors")
    stored = gguf_tensors(model)["blk.1.ffn_down.weight"]
    expected = gguf.quants.dequantize(gguf.quants.quantize(stored, kind), kind)
    assert np.array_equal(weights["model.layers.1.mlp.down_proj.weight"].numpy(), expected)
    step = 1 / 127 if kind == Q8_0 else 1 / 15
    for name, weight in weights.items():
        assert weight.dtype == torch.float32
        original = model.state_dict()[name]
        assert (weight - original).abs().max() <= step * original.abs().max(), name


def test_many_files_of_weights_load_like_one(tmp_path: Path, monkeypatch: Any) -> None:
    """Catches an index that does not fit the files once a model outgrows one of them."""
    monkeypatch.setattr(converter, "SHARD_BYTES", 50_000)
    model = build_llama()
    folder = convert(TinyGguf(model), tmp_path)
    assert len(list(folder.glob("model-*-of-*.safetensors"))) > 2
    assert torch.equal(logits_of(load(folder)), logits_of(model))


def test_the_config_is_the_original_one(tmp_path: Path) -> None:
    """Catches a number that GGUF rounded to float32, and heads or lengths mixed up."""
    model = build_llama(rms_norm_eps=1e-5)
    folder = convert(TinyGguf(model), tmp_path)
    factory: Any = AutoConfig
    config = factory.from_pretrained(folder)
    for name in (
        "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "head_dim",
        "num_attention_heads", "num_key_value_heads", "max_position_embeddings", "rms_norm_eps",
        "rope_parameters", "tie_word_embeddings",
    ):  # fmt: skip
        assert getattr(config, name) == getattr(model.config, name), name
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (0, 2, 2)


def test_the_tokenizer_reads_digits_and_markers(tmp_path: Path) -> None:
    """Catches a pre-tokenizer that is guessed: numbers would be cut otherwise than in training."""
    folder = convert(TinyGguf(build_llama()), tmp_path)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    assert tokenizer.tokenize("the 12") == ["the", "Ġ", "1", "2"]
    assert tokenizer.encode("<|im_end|>") == [2]
    assert tokenizer.decode(tokenizer.encode("été 😀")) == "été 😀"
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<s>", "<|im_end|>")
    rendered = tokenizer.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False)
    assert rendered == "<|im_start|>user\nx<|im_end|>\n"


def test_a_tokenizer_that_adds_bos_still_does(tmp_path: Path) -> None:
    """Catches the flag of the file being ignored."""
    tiny = TinyGguf(build_llama(), keys={"tokenizer.ggml.add_bos_token": True})
    tokenizer = PreTrainedTokenizerFast.from_pretrained(convert(tiny, tmp_path))
    assert tokenizer.encode("the") == [0, tokenizer.convert_tokens_to_ids("the")]


def test_every_end_of_turn_is_an_end(tmp_path: Path) -> None:
    """Catches a chat model that talks on because only its base's end is known."""
    tiny = TinyGguf(build_llama(), keys={"tokenizer.ggml.eot_token_id": 1})
    factory: Any = AutoConfig
    assert factory.from_pretrained(convert(tiny, tmp_path)).eos_token_id == [2, 1]


def test_the_second_start_converts_nothing(tmp_path: Path) -> None:
    """Catches a start that takes as long as the first one, or a cache that follows the path."""
    path = TinyGguf(build_llama()).write(tmp_path / "tiny.gguf")
    root, lines = tmp_path / "cache", list[str]()
    assert find_converted(path, cache_root=root) is None
    folder = convert_gguf(path, cache_root=root, report=lines.append)
    assert len(lines) == 1
    assert "once" in lines[0]
    assert convert_gguf(path, cache_root=root, report=lines.append) == folder
    assert find_converted(path, cache_root=root) == folder
    assert len(lines) == 1


def test_a_changed_source_is_converted_anew(tmp_path: Path) -> None:
    """Catches a cache that trusts name, size and time: here all three are equal."""
    root = tmp_path / "cache"
    path = TinyGguf(build_llama()).write(tmp_path / "tiny.gguf")
    first = convert_gguf(path, cache_root=root, report=silent)
    data = bytearray(path.read_bytes())
    data[-4:] = np.float32(0.5).tobytes()
    path.write_bytes(data)
    assert convert_gguf(path, cache_root=root, report=silent) != first


LLAMA = build_llama()
SPARE = np.zeros((64, 64), dtype=np.float32)
REFUSED: dict[str, tuple[TinyGguf, str]] = {
    "architecture": (TinyGguf(LLAMA, architecture="mamba"), "'mamba'.*only gemma3, llama"),
    "tensor": (
        TinyGguf(LLAMA, more_tensors={"blk.0.attn_sinks.weight": SPARE}),
        "unknown tensors: blk.0.attn_sinks.weight",
    ),
    "rope factors": (
        TinyGguf(LLAMA, more_tensors={"rope_freqs.weight": SPARE[0]}),
        "unknown tensors: rope_freqs.weight",
    ),
    "missing": (
        TinyGguf(LLAMA, without="blk.1.attn_k.weight"),
        "lacks tensors: blk.1.attn_k.weight",
    ),
    "rope": (TinyGguf(LLAMA, keys={"llama.rope.scaling.type": "yarn"}), "yarn"),
    "rotation": (TinyGguf(LLAMA, keys={"llama.rope.dimension_count": 8}), "8 of 16"),
    "experts": (TinyGguf(LLAMA, keys={"llama.expert_count": 4}), "experts"),
    "key": (TinyGguf(LLAMA, keys={"llama.block_count": None}), "lacks the key 'llama.block_count'"),
    "layers": (
        TinyGguf(LLAMA, keys={"llama.attention.head_count": [4, 2]}),
        "'llama.attention.head_count' holds list",
    ),
    "tokenizer": (TinyGguf(LLAMA, keys={"tokenizer.ggml.model": "rwkv"}), "byte-level BPE"),
    "space": (TinyGguf(LLAMA, keys={"tokenizer.ggml.model": "llama"}), "a space before each text"),
    "splitting": (TinyGguf(LLAMA, keys={"tokenizer.ggml.pre": "tekken"}), "'tekken'.*smollm"),
    "merges": (TinyGguf(LLAMA, keys={"tokenizer.ggml.merges": ["th"]}), "not a pair: 'th'"),
    "twice": (
        TinyGguf(LLAMA, keys={"tokenizer.ggml.tokens": [*gguf_tokens()[:-1], "the"]}),
        "one token twice",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_not_understood_is_refused_by_name(tmp_path: Path, what: str) -> None:
    """Catches a file that is converted into a model that computes something else."""
    tiny, says = REFUSED[what]
    with pytest.raises(UnsupportedModelError, match=says):
        convert(tiny, tmp_path)
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] == [".lock"]


@pytest.mark.parametrize("damage", ["text", "cut header", "cut tensors", "empty"])
def test_a_damaged_file_is_the_callers_error(tmp_path: Path, damage: str) -> None:
    """Catches an IndexError from deep inside a reader for half a download."""
    path = TinyGguf(LLAMA).write(tmp_path / "tiny.gguf")
    data = path.read_bytes()
    pieces = {"text": b"hello" * 20, "cut header": data[:3000], "cut tensors": data[:-100]}
    path.write_bytes(pieces.get(damage, b""))
    with pytest.raises(InvalidRequest, match="not a complete GGUF file"):
        convert_gguf(path, cache_root=tmp_path / "cache", report=silent)


def test_float_tensors_are_written_as_they_are() -> None:
    """Catches a test that proves nothing: the writer here must not be the converter's inverse."""
    tensors = gguf_tensors(LLAMA)
    query = LLAMA.state_dict()["model.layers.0.self_attn.q_proj.weight"].numpy()
    written = tensors["blk.0.attn_q.weight"]
    assert np.array_equal(written[1], query[8])  # head_dim 16: row 1 is the second half's first
    assert np.array_equal(written[2], query[1])
