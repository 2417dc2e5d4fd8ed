"""Random LoRA adapters in folders as PEFT saves them, and models with an adapter merged in.

The format is written out here, so that a test does not believe the reader. It knows no product.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
RANK, ALPHA = 4, 6.0


def save_adapter(
    folder: Path,
    model: PreTrainedModel,
    *,
    seed: int,
    targets: Sequence[str] = (*ATTENTION, *MLP),
    tensors: dict[str, Tensor] | None = None,
    **config: Any,
) -> Path:
    """Writes a random adapter for a model.

    Args:
        folder: Made if missing.
        model: Plain, as it is before adapters are put beside its layers.
        seed: Of the matrices.
        targets: Last names of the linear layers that it changes.
        tensors: What else the file holds.
        config: Entries of the config to set otherwise.
    """
    generator = torch.Generator().manual_seed(seed)
    weights = dict(tensors or {})
    for name, layer in model.named_modules():
        if name.rpartition(".")[2] in targets and isinstance(layer, nn.Linear):
            rank = config.get("rank_pattern", {}).get(name.rpartition(".")[2], RANK)
            key = f"base_model.model.{name}.lora_"
            shape = (rank, layer.in_features), (layer.out_features, rank)
            for side, size in zip("AB", shape, strict=True):
                weights[f"{key}{side}.weight"] = torch.randn(size, generator=generator) * 0.2
    said = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": RANK,
        "lora_alpha": ALPHA,
        "target_modules": list(targets),
        "lora_dropout": 0.1,
        "bias": "none",
        "use_dora": False,
        "use_rslora": False,
        "fan_in_fan_out": False,
        "modules_to_save": None,
        "init_lora_weights": True,
        "inference_mode": True,
        "rank_pattern": {},
        "alpha_pattern": {},
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(said | config))
    save_file(weights, folder / "adapter_model.safetensors")
    return folder


def merge(model: PreTrainedModel, folder: Path, *, factor: float = ALPHA / RANK) -> PreTrainedModel:
    """Adds an adapter to a model's weights, in place, all layers scaled by one factor."""
    from safetensors.torch import load_file

    weights = load_file(folder / "adapter_model.safetensors")
    with torch.no_grad():
        for key in [key for key in weights if key.endswith("lora_A.weight")]:
            name = key.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            layer: Any = model.get_submodule(name)
            layer.weight += factor * weights[key.replace("lora_A", "lora_B")] @ weights[key]
    return model
