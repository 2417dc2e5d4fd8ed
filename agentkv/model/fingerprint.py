"""Takes a model's fingerprint: what tells it from any other."""

import hashlib
import json
from typing import Any

import torch
from torch import Tensor

from agentkv.core.model_identity import Fingerprint
from agentkv.model.loader import LoadedModel

SAMPLES = 1024
"""Numbers of each weight that are looked at one by one."""


def fingerprint(loaded: LoadedModel) -> Fingerprint:
    """Takes the fingerprint of a model as it was loaded, before anything is packed or compiled.

    Each weight counts by its name, shape, the sum of all its bits as integers, and `SAMPLES` of
    its numbers at even distances: every change of one number is seen, and reading the weights
    once is all it takes.
    """
    untyped: Any = loaded.tokenizer
    config: Any = loaded.model.config.get_text_config()
    described = {
        name: value
        for name, value in config.to_dict().items()
        if name not in ("_name_or_path", "transformers_version", "dtype", "torch_dtype")
        and not name.startswith("_")
    }
    weights = hashlib.sha256()
    with torch.inference_mode():
        for name, weight in sorted(loaded.model.named_parameters()):
            weights.update(f"{name} {tuple(weight.shape)} {weight.dtype}".encode())
            weights.update(_digest(weight))
    return Fingerprint(
        architecture=loaded.architecture,
        dtype=str(loaded.dtype).removeprefix("torch."),
        config=_sha256(json.dumps(described, sort_keys=True, default=str)),
        weights=weights.hexdigest(),
        tokenizer=_sha256(untyped.backend_tokenizer.to_str()),
    )


def _digest(weight: Tensor) -> bytes:
    sizes = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    bits = weight.detach().reshape(-1).view(sizes[weight.element_size()])
    samples = bits[:: max(1, len(bits) // SAMPLES)].to("cpu", torch.int64)
    total = int(bits.sum(dtype=torch.int64))
    return total.to_bytes(8, "little", signed=True) + samples.contiguous().numpy().tobytes()


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
