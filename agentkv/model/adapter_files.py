"""Reads LoRA adapters from folders as the library PEFT saves them.

    adapter_config.json          how the adapter was trained, and how it is scaled
    adapter_model.safetensors    base_model.model.<module>.lora_A.weight and .lora_B.weight

It owns what of the format is understood. What would be left out of the result is refused by name:
an ignored option is a silently wrong model. It knows no model. (Hu et al., LoRA, 2021;
Kalajdzievski, rsLoRA, 2023, for scaling by the root of the rank.)
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import Tensor

from agentkv.errors import InvalidRequest, UnsupportedModelError

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
_PREFIX = "base_model.model."
_KNOWN = frozenset(
    {
        *("alpha_pattern", "lora_alpha", "r", "rank_pattern", "use_rslora"),  # read below
        # Of training, or saying in words what the weights say by their names:
        *("auto_mapping", "base_model_name_or_path", "exclude_modules", "inference_mode"),
        *("layers_pattern", "layers_to_transform", "lora_dropout", "peft_type", "peft_version"),
        *("revision", "target_modules", "task_type", "ensure_weight_tying"),
        *("eva_config", "lora_ga_config", "megatron_core", "qalora_group_size"),
    }
)
_PLAIN_STARTS = (True, False, "gaussian", "eva", "orthogonal")
"""Ways to begin training that leave the base model's weights alone."""


@dataclass(frozen=True, slots=True)
class LowRank:
    """What an adapter adds to one linear layer: x @ down.T @ up.T."""

    down: Tensor
    """(rank, in_features)."""
    up: Tensor
    """(out_features, rank), scaled already."""


@dataclass(frozen=True, slots=True)
class Adapter:
    """One adapter."""

    name: str
    parts: Mapping[str, LowRank]
    """By the name of the module in the model, for example `model.layers.0.self_attn.q_proj`."""


def read_adapter(name: str, folder: Path) -> Adapter:
    """Reads an adapter.

    Args:
        name: As clients will name it.
        folder: Where PEFT saved it.

    Raises:
        InvalidRequest: The folder lacks a file, or one is damaged.
        UnsupportedModelError: The adapter does something that is not understood; names what.
    """
    # Imported here: the reader of tensors is slow to load, and most servers have no adapter.
    from safetensors.torch import load_file

    try:
        config: dict[str, Any] = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
        tensors = load_file(folder / WEIGHTS_FILE)
    except (OSError, ValueError, SafetensorError) as error:
        raise InvalidRequest(
            f"The adapter {name} cannot be read from {folder}, which needs {CONFIG_FILE} and "
            f"{WEIGHTS_FILE} as PEFT saves them: {error}"
        ) from error
    _check_config(name, config)
    return Adapter(name, _parts(name, config, tensors))


def _check_config(name: str, config: Mapping[str, Any]) -> None:
    """Refuses what the sum of low-rank products would not show."""
    if config.get("peft_type") != "LORA":
        raise UnsupportedModelError(
            f"The adapter {name} is of type {config.get('peft_type')!r}; only LORA can be served."
        )
    refused = [
        f"{key} {value!r}"
        for key, value in config.items()
        if key not in _KNOWN and not _is_off(key, value)
    ]
    if refused:
        raise UnsupportedModelError(
            f"The adapter {name} uses what cannot be served: {', '.join(sorted(refused))}. Merge "
            "it into the model (PEFT's merge_and_unload), or train a plain LoRA of linear layers."
        )


def _is_off(key: str, value: object) -> bool:
    """Whether an option that is not known does nothing."""
    if key == "init_lora_weights":
        return value in _PLAIN_STARTS
    return not value or (key == "bias" and value == "none")


def _parts(
    name: str, config: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> dict[str, LowRank]:
    """Pairs the matrices of each module."""
    found: dict[str, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        match = re.fullmatch(re.escape(_PREFIX) + r"(.+)\.lora_([AB])\.weight", key)
        if match is None or tensor.ndim != 2:
            raise UnsupportedModelError(
                f"The adapter {name} holds {key}, which is no low-rank matrix of a linear layer; "
                "embeddings, biases, magnitudes and whole modules cannot be served."
            )
        found.setdefault(match[1], {})[match[2]] = tensor
    parts: dict[str, LowRank] = {}
    for module, pair in found.items():
        if len(pair) != 2 or pair["A"].shape[0] != pair["B"].shape[1]:
            raise InvalidRequest(f"The adapter {name} has no two matching matrices for {module}.")
        scale = _scale(config, module, rank=pair["A"].shape[0])
        parts[module] = LowRank(pair["A"].float(), pair["B"].float() * scale)
    if not parts:
        raise InvalidRequest(f"The adapter {name} changes no module.")
    return parts


def _scale(config: Mapping[str, Any], module: str, *, rank: int) -> float:
    """Computes the factor of a module's product."""
    alpha = float(_of_module(config.get("alpha_pattern"), module, config.get("lora_alpha", 8)))
    said = _of_module(config.get("rank_pattern"), module, config.get("r", 8))
    if said != rank:
        raise InvalidRequest(f"{module} has rank {rank}, where {CONFIG_FILE} says {said}.")
    return float(alpha / rank**0.5 if config.get("use_rslora") else alpha / rank)


def _of_module(patterns: Mapping[str, Any] | None, module: str, otherwise: object) -> Any:
    """Finds what a pattern says of a module, by PEFT's rule: the name, or its end after a dot."""
    for pattern, value in (patterns or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            return value
    return otherwise
