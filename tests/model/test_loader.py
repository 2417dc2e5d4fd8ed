"""Loading by name: the right folder, the right facts, and refusals that say what to do."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
import torch
import transformers.utils.logging
from safetensors.torch import load_file, save_file
from tiny_gguf import TinyGguf, build_llama
from tiny_models import build_tiny_model
from tiny_tokenizers import build_tiny_tokenizer
from transformers import LlamaForCausalLM

from agentkv.errors import InvalidRequest, UnsupportedModelError
from agentkv.model import hub
from agentkv.model.loader import load_model, resolve


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as transformers writes it; tests that change it take a copy."""
    folder = tmp_path_factory.mktemp("saved")
    model = build_llama()
    assert model.generation_config is not None
    model.generation_config.eos_token_id = [1]
    model.save_pretrained(folder)
    build_tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(autouse=True)
def no_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of the Hub, and no way to the Hub itself."""
    cache = tmp_path / "hub"
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    return cache


def copy_of(folder: Path, target: Path) -> Path:
    target.mkdir()
    for path in folder.iterdir():
        (target / path.name).write_bytes(path.read_bytes())
    return target


def change_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_a_folder_is_loaded_with_its_facts(saved: Path) -> None:
    """Catches facts that are guessed: ends of generation, lengths, the width of the logits."""
    loaded = load_model(str(saved))
    assert loaded.folder == saved
    assert loaded.architecture == "LlamaForCausalLM"
    assert loaded.vocab_size == loaded.model.config.vocab_size
    assert (loaded.max_length, loaded.num_layers) == (256, 2)
    assert (loaded.dtype, loaded.device.type) == (torch.float32, "cpu")
    assert loaded.eos_token_ids == (1, 2)  # the generation config's, and the tokenizer's
    assert not loaded.model.training
    unique = {weight.data_ptr(): weight.nbytes for weight in loaded.model.parameters()}
    assert loaded.weight_bytes == sum(unique.values())


def test_loading_says_nothing(saved: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Catches progress bars in a server's log, and a library left silenced for the caller."""
    logging: Any = transformers.utils.logging
    before = (logging.get_verbosity(), logging.is_progress_bar_enabled())
    load_model(str(saved))
    assert capfd.readouterr() == ("", "")
    assert (logging.get_verbosity(), logging.is_progress_bar_enabled()) == before


def test_the_dtype_is_the_callers(saved: Path) -> None:
    """Catches a bfloat16 model on a CPU, where it is slow, unless it is asked for."""
    assert load_model(str(saved), dtype="bfloat16").dtype is torch.bfloat16
    with pytest.raises(InvalidRequest, match="float32, bfloat16, float16"):
        load_model(str(saved), dtype="int3")


def test_a_gguf_file_is_converted_and_loaded(tmp_path: Path) -> None:
    """Catches a path that is taken for the name of a repository."""
    path = TinyGguf(build_llama()).write(tmp_path / "tiny.gguf")
    lines: list[str] = []
    loaded = load_model(str(path), report=lines.append)
    assert loaded.eos_token_ids == (2,)
    assert loaded.folder.is_relative_to(tmp_path / "user" / "agentkv")
    assert len(lines) == 1


def test_a_snapshot_in_the_hubs_cache_needs_no_network(saved: Path, no_network: Path) -> None:
    """Catches a start that asks the network first, and one that takes half a download."""
    assert hub.find_snapshot("someone/tiny") is None
    repository = no_network / "models--someone--tiny"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("abc")
    (repository / "snapshots").mkdir()
    snapshot = copy_of(saved, repository / "snapshots" / "abc")
    assert load_model("someone/tiny").folder == snapshot
    index = {"weight_map": {"x": "model-00001-of-00002.safetensors"}}
    (snapshot / "model.safetensors.index.json").write_text(json.dumps(index))
    assert hub.find_snapshot("someone/tiny") is None


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("smollm3", "Known aliases are gemma3-270m, smollm2"),
        ("/nowhere/at/all", "no such folder"),
        ("./missing.gguf", "no such .gguf file"),
        ("", "owner/name"),
        ("someone/absent", "connect to the network"),
        ("some one/absent", "check the name"),
    ],
)
def test_a_name_that_leads_nowhere_says_what_would(name: str, says: str) -> None:
    """Catches a stack trace from the Hub's client for a typing error."""
    with pytest.raises(InvalidRequest, match=says):
        resolve(name)


def without_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def without_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def with_half_the_weights(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:5000])


def without_one_tensor(folder: Path) -> None:
    path = folder / "model.safetensors"
    weights = load_file(path)
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, path, metadata={"format": "pt"})


def with_another_shape(folder: Path) -> None:
    change_config(folder, intermediate_size=32)


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (without_config, "lacks a config.json"),
        (without_weights, "lacks"),
        (with_half_the_weights, "cannot be read"),
        (without_one_tensor, "up_proj"),
        (with_another_shape, "do not fit.*down_proj"),
    ],
)
def test_damaged_files_are_refused(
    saved: Path, tmp_path: Path, damage: Callable[[Path], None], says: str
) -> None:
    """Catches weights that are missing and filled with random numbers in silence."""
    folder = copy_of(saved, tmp_path / "copy")
    damage(folder)
    with pytest.raises(InvalidRequest, match=says):
        load_model(str(folder))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"model_type": "t5"}, "encoder-decoder"),
        ({"model_type": "vit"}, "no causal language model of type 'vit'"),
        ({"model_type": "of_their_own"}, "without running the model's own code"),
        (
            {"model_type": "of_their_own", "auto_map": {"AutoConfig": "evil.Config"}},
            "without running the model's own code",
        ),
        (
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
            "dynamic",
        ),
    ],
)
def test_models_that_cannot_be_exact_are_refused(
    saved: Path, tmp_path: Path, changes: dict[str, Any], says: str
) -> None:
    """Catches remote code being run, and models whose cached keys would disagree later."""
    folder = copy_of(saved, tmp_path / "copy")
    change_config(folder, **changes)
    (folder / "evil.py").write_text("raise SystemExit('remote code ran')")
    with pytest.raises(UnsupportedModelError, match=says):
        load_model(str(folder))


@pytest.mark.parametrize(
    ("family", "says"),
    [("llama4", "chunked_attention"), ("falcon", "FalconForCausalLM does not take")],
)
def test_families_known_to_differ_are_refused(tmp_path: Path, family: str, says: str) -> None:
    """Catches the two families that would be served with silently wrong logits."""
    build_tiny_model(family).save_pretrained(tmp_path / family)
    with pytest.raises(UnsupportedModelError, match=says):
        load_model(str(tmp_path / family))


def test_a_gpu_that_is_not_there_or_too_small_is_refused(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a traceback of torch's for the seventh of two GPUs, or for weights too large."""

    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(LlamaForCausalLM, "to", full)
    with pytest.raises(InvalidRequest, match=r"no device cuda:7; this computer has 2"):
        load_model(str(saved), device="cuda:7")
    with pytest.raises(InvalidRequest, match=r"take 0.00 GiB, which cuda:1 has not free"):
        load_model(str(saved), device="cuda:1")


@pytest.mark.parametrize(("device", "says"), [("warp:9", "knows no device"), ("cuda", "use the")])
def test_a_device_that_is_not_there_is_refused(
    saved: Path, device: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a RuntimeError of torch, minutes into a load."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(InvalidRequest, match=says):
        load_model(str(saved), device=device)
