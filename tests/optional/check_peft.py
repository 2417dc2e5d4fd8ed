"""Adapters made and merged by the library PEFT itself, against AgentKV's.

PEFT is no dependency of anything else here: `make models` installs it beside the environment and
runs this file.
"""

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from tiny_models import build_tiny_model
from torch import Tensor

from agentkv.core.batch import AdapterRows
from agentkv.errors import UnsupportedModelError
from agentkv.model.adapter_files import read_adapter
from agentkv.model.golden_check import check_model
from agentkv.model.lora import install_adapters
from agentkv.model.model_shape import describe_model
from agentkv.model.sampler import Sampler

pytestmark = pytest.mark.filterwarnings("ignore::Warning")  # PEFT's, about what it calls itself

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {"target_modules": ["q_proj", "v_proj"]},
    "all linear": {"target_modules": "all-linear", "lora_alpha": 16},
    "patterns": {
        "target_modules": ["q_proj", "k_proj", "down_proj"],
        "rank_pattern": {"layers.0.self_attn.k_proj": 2},
        "alpha_pattern": {"down_proj": 3.0},
    },
    "rslora": {"target_modules": r".*layers\.1.*(q|o)_proj", "use_rslora": True},
    "some layers": {"target_modules": ["up_proj"], "layers_to_transform": [1]},
}


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3"])
@pytest.mark.parametrize("name", OPTIONS)
def test_an_adapter_of_peft_equals_its_merged_model(family: str, name: str, tmp_path: Path) -> None:
    """Catches a scale, a name or a side that PEFT means otherwise than we read it."""
    torch.manual_seed(0)
    config = peft.LoraConfig(r=4, task_type="CAUSAL_LM", **OPTIONS[name])
    tuned: Any = peft.get_peft_model(build_tiny_model(family), config)
    with torch.no_grad():
        for key, weight in tuned.named_parameters():
            if "lora_" in key:
                weight.normal_(std=0.2)
    tuned.save_pretrained(tmp_path)
    ids = torch.arange(5, 17)[None]
    merged = logits(tuned.merge_and_unload(), ids)
    model: Any = build_tiny_model(family)
    before = logits(model, ids)
    step = install_adapters(model, [read_adapter("a", tmp_path)])
    step.begin((AdapterRows("a", 0, 12),), 12)
    changed = logits(model, ids)
    step.begin((), 0)
    torch.testing.assert_close(changed, merged, rtol=0, atol=1e-4)
    assert (changed - before).abs().max() > 0.05
    shape = describe_model(model)
    report = check_model(model, shape, Sampler(), block_size=4, adapters=step, adapter="a")
    assert report.error < 1e-5


def logits(model: Any, ids: Tensor) -> Tensor:
    model.set_attn_implementation("eager")
    with torch.inference_mode():
        answer: Tensor = model(ids, use_cache=False).logits[0]
    return answer


def test_what_peft_offers_beyond_lora_is_refused(tmp_path: Path) -> None:
    """Catches an option that PEFT writes by another name than we refuse it by."""
    beyond: list[dict[str, Any]] = [
        {"use_dora": True},
        {"bias": "lora_only"},
        {"modules_to_save": ["lm_head"]},
    ]
    for number, options in enumerate(beyond):
        config = peft.LoraConfig(r=4, target_modules=["q_proj"], **options)
        tuned: Any = peft.get_peft_model(build_tiny_model("llama"), config)
        tuned.save_pretrained(tmp_path / str(number))
        with pytest.raises(UnsupportedModelError, match="cannot be served"):
            read_adapter("a", tmp_path / str(number))
