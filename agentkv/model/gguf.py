"""Converts a GGUF file into a folder of safetensors, once.

It owns names, shapes and numbers of the weights; the tokenizer is `gguf_tokenizer`'s, where the
result lies is `conversion_cache`'s. Another architecture is an entry of `gguf_architectures`.

The reader of transformers is not used: it needs a further library at run time, loses the digit
splitting of this family's tokenizer, and would do the work again at every start.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from agentkv.errors import InvalidRequest, UnsupportedModelError
from agentkv.model import conversion_cache
from agentkv.model.conversion_cache import CacheKey
from agentkv.model.gguf_architectures import ARCHITECTURES, Architecture
from agentkv.model.gguf_metadata import GgufMetadata
from agentkv.model.gguf_source import GgufSource
from agentkv.model.gguf_tokenizer import write_tokenizer

if TYPE_CHECKING:
    from gguf import GGUFReader

FORMAT = 2
"""Raised whenever the same GGUF file would be converted differently."""
SHARD_BYTES = 2 * 2**30
"""Most bytes of tensors held in memory and written to one file."""

Report = Callable[[str], None]


def convert_gguf(
    given: Path | GgufSource, *, cache_root: Path | None = None, report: Report
) -> Path:
    """Finds or makes the converted folder of a GGUF file.

    Args:
        given: The GGUF file, or its parts.
        cache_root: Folder of all conversions; None takes the user's cache.
        report: Called with a line when the file has to be converted, which takes seconds.

    Returns:
        A folder with `config.json`, `generation_config.json`, `model*.safetensors` (float32),
        `tokenizer.json` and `tokenizer_config.json`.

    Raises:
        UnsupportedModelError: The file holds an architecture, a tensor or a tokenizer that is
            not understood.
        InvalidRequest: The file is not GGUF, or is cut short.
        OSError: The cache cannot be written.
    """
    source = GgufSource.of(given)
    key = CacheKey(source.stem, source.sha256(), FORMAT)

    def build(folder: Path) -> None:
        report(f"Converting {source.stem} once; later starts reuse the result.")
        _write_folder(_open(source.whole(folder.parent)), folder)

    return conversion_cache.find_or_build(cache_root or conversion_cache.default_root(), key, build)


def find_converted(given: Path | GgufSource, *, cache_root: Path | None = None) -> Path | None:
    """Finds the converted folder of a GGUF file; None when it would have to be made."""
    source = GgufSource.of(given)
    key = CacheKey(source.stem, source.sha256(), FORMAT)
    return conversion_cache.find(cache_root or conversion_cache.default_root(), key)


def _open(path: Path) -> "GGUFReader":
    # Imported here: a start that finds the converted folder never needs it.
    from gguf import GGUFReader

    try:
        return GGUFReader(path)
    except (ValueError, IndexError, KeyError, OverflowError) as error:
        raise InvalidRequest(
            f"{path} is not a complete GGUF file ({error}); fetch it again."
        ) from error


def _write_folder(reader: "GGUFReader", folder: Path) -> None:
    metadata = GgufMetadata(reader)
    name = metadata.require("general.architecture", str)
    if name not in ARCHITECTURES:
        raise UnsupportedModelError(
            f"GGUF files of architecture {name!r} cannot be converted, only "
            f"{', '.join(sorted(ARCHITECTURES))}; load the model's safetensors instead."
        )
    architecture = ARCHITECTURES[name]
    config = _model_config(reader, metadata, name, architecture)
    _write_weights(reader, architecture, config, folder)
    tokens = write_tokenizer(metadata, folder, max_length=config["max_position_embeddings"])
    _write_json(folder / "config.json", config | tokens.config_entries())
    _write_json(folder / "generation_config.json", tokens.config_entries())


def _model_config(
    reader: "GGUFReader", metadata: GgufMetadata, name: str, architecture: Architecture
) -> dict[str, Any]:
    """Says in the words of a Hugging Face config what the keys of the file say."""
    _refuse_unknown_features(metadata, name)
    shapes = {tensor.name: tuple(int(n) for n in tensor.shape) for tensor in reader.tensors}
    if "token_embd.weight" not in shapes:
        raise UnsupportedModelError("The GGUF file lacks the tensor token_embd.weight.")
    num_heads = metadata.require(f"{name}.attention.head_count", int)
    hidden_size = metadata.require(f"{name}.embedding_length", int)
    head_dim = metadata.get(f"{name}.attention.key_length", int) or hidden_size // num_heads
    rotated = metadata.get(f"{name}.rope.dimension_count", int) or head_dim
    if rotated != head_dim:
        raise UnsupportedModelError(
            f"The GGUF file rotates {rotated} of {head_dim} dimensions per head."
        )
    config: dict[str, Any] = {
        "architectures": [architecture.model_class],
        "model_type": architecture.model_type,
        "dtype": "float32",
        "vocab_size": shapes["token_embd.weight"][1],  # GGUF names the fastest dimension first
        "hidden_size": hidden_size,
        "intermediate_size": metadata.require(f"{name}.feed_forward_length", int),
        "num_hidden_layers": metadata.require(f"{name}.block_count", int),
        "num_attention_heads": num_heads,
        "num_key_value_heads": metadata.get(f"{name}.attention.head_count_kv", int) or num_heads,
        "head_dim": head_dim,
        "max_position_embeddings": metadata.require(f"{name}.context_length", int),
        "rms_norm_eps": _short(metadata.require(f"{name}.attention.layer_norm_rms_epsilon", float)),
        "rope_theta": _short(metadata.get(f"{name}.rope.freq_base", float) or 10000.0),
        "tie_word_embeddings": "output.weight" not in shapes,
        **architecture.config,
    }
    return config | architecture.more_config(metadata, config)


def _refuse_unknown_features(metadata: GgufMetadata, name: str) -> None:
    if metadata.get(f"{name}.expert_count", int):
        raise UnsupportedModelError(f"GGUF files of {name} with experts cannot be converted.")
    scaling = metadata.get(f"{name}.rope.scaling.type", str)
    if scaling not in (None, "none"):
        raise UnsupportedModelError(
            f"The GGUF file scales its rotary embedding ({scaling}); load the model's "
            "safetensors instead."
        )


def _write_weights(
    reader: "GGUFReader", architecture: Architecture, config: Mapping[str, Any], folder: Path
) -> None:
    """Writes every tensor as float32, in files of at most about SHARD_BYTES."""
    from safetensors.numpy import save_file

    shards = _shards(_tensor_names(reader, architecture, config), reader)
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        file_name = (
            "model.safetensors"
            if len(shards) == 1
            else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        )
        tensors = dict(_float_tensors(reader, shard, architecture, config))
        save_file(tensors, folder / file_name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, file_name)
    if len(shards) > 1:
        total = sum(4 * int(tensor.n_elements) for tensor in reader.tensors)
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        _write_json(folder / "model.safetensors.index.json", index)


def _tensor_names(
    reader: "GGUFReader", architecture: Architecture, config: Mapping[str, Any]
) -> dict[str, str]:
    """Maps every tensor of the file to its name in the model.

    Raises:
        UnsupportedModelError: The file has a tensor the model lacks, or the reverse.
    """
    names = {
        "token_embd.weight": "model.embed_tokens.weight",
        "output_norm.weight": "model.norm.weight",
    }
    if not config["tie_word_embeddings"]:
        names["output.weight"] = "lm_head.weight"
    for layer in range(config["num_hidden_layers"]):
        for part, model_part in architecture.block_tensors.items():
            names[f"blk.{layer}.{part}.weight"] = f"model.layers.{layer}.{model_part}.weight"
    present = {tensor.name for tensor in reader.tensors}
    if unknown := sorted(present - set(names)):
        raise UnsupportedModelError(
            f"The GGUF file holds unknown tensors: {', '.join(unknown[:5])}."
        )
    if missing := sorted(set(names) - present):
        raise UnsupportedModelError(f"The GGUF file lacks tensors: {', '.join(missing[:5])}.")
    return names


def _shards(names: Mapping[str, str], reader: "GGUFReader") -> list[dict[str, str]]:
    """Splits the names into files by the size of their tensors as float32."""
    shards: list[dict[str, str]] = [{}]
    filled = 0
    for tensor in reader.tensors:
        size = 4 * int(tensor.n_elements)
        if shards[-1] and filled + size > SHARD_BYTES:
            shards.append({})
            filled = 0
        shards[-1][tensor.name] = names[tensor.name]
        filled += size
    return shards


def _float_tensors(
    reader: "GGUFReader",
    names: Mapping[str, str],
    architecture: Architecture,
    config: Mapping[str, Any],
) -> Iterator[tuple[str, NDArray[np.float32]]]:
    from gguf.quants import dequantize

    for tensor in reader.tensors:
        if tensor.name not in names:
            continue
        try:
            weight = dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
        except NotImplementedError as error:
            raise UnsupportedModelError(
                f"The GGUF file is quantised as {tensor.tensor_type.name}, which cannot be read."
            ) from error
        weight = weight.reshape(tuple(int(n) for n in reversed(tensor.shape)))
        part = tensor.name.split(".")[2] if tensor.name.startswith("blk.") else ""
        if part in architecture.interleaved:
            weight = _undo_interleaving(weight, config[architecture.interleaved[part]])
        if architecture.norms_are_shifted and tensor.name.endswith("norm.weight"):
            weight = weight - 1  # the model adds it back
        yield names[tensor.name], np.ascontiguousarray(weight)


def _undo_interleaving(weight: NDArray[np.float32], num_heads: int) -> NDArray[np.float32]:
    """Puts the rows of a query or key projection back into the model's order.

    llama.cpp rotates neighbouring dimensions (2i, 2i + 1), Hugging Face's llama the dimensions
    i and i + head_dim / 2; its conversion script therefore interleaves the two halves of each
    head, and this is the inverse.

    Args:
        weight: (num_heads * head_dim, hidden_size), or one dimension for a bias.
        num_heads: Heads of this projection.
    """
    halves = weight.reshape(num_heads, weight.shape[0] // num_heads // 2, 2, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def _short(value: float) -> float:
    """Gives a number stored as float32 its shortest decimal back: 1e-5, not 9.99999975e-6."""
    return float(str(np.float32(value)))


def _write_json(path: Path, content: Mapping[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
