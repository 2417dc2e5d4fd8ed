"""Loads a model by name: weights, tokenizer, and the facts that the rest needs to know.

It owns where a name leads and what a load may do (no remote code, no silent random weights). It
knows no blocks and no attention; what a model computes is checked by the golden check.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers.utils.logging as transformers_logging
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from agentkv.errors import InvalidRequest, UnsupportedModelError
from agentkv.model import hub
from agentkv.model.catalog import ALIASES
from agentkv.model.gguf_source import GgufSource
from agentkv.model.support import check_supported

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

Report = Callable[[str], None]


def _silent(_: str) -> None:
    pass


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to run, in evaluation mode, and what else its files say.

    The shape of its KV is not here: configs say it wrongly, `model_shape` asks the model.
    """

    name: str
    """As the caller named it: an alias, a path or a Hub id."""
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerFast
    folder: Path
    """Where the weights were read from."""
    architecture: str
    """Name of the model's class, for example LlamaForCausalLM."""
    vocab_size: int
    """Width of the logits; may exceed the number of tokens the tokenizer knows."""
    max_length: int
    """Most tokens of one context."""
    num_layers: int
    dtype: torch.dtype
    device: torch.device
    eos_token_ids: tuple[int, ...]
    """Tokens that end generation, ascending; empty when the model names none."""
    weight_bytes: int
    """Bytes of all parameters, tied ones counted once."""


def load_model(
    name: str, *, dtype: str = "auto", device: str = "cpu", report: Report = _silent
) -> LoadedModel:
    """Loads a model and its tokenizer.

    Args:
        name: An alias of the catalog, a folder of safetensors, a `.gguf` file, or `owner/name`
            on the Hugging Face Hub.
        dtype: `float32`, `bfloat16`, `float16`, or `auto`: float32 on a CPU, else what the
            model's config says.
        device: A torch device, for example `cpu` or `cuda:0`.
        report: Called with a line before anything that takes long: a download, a conversion.

    Raises:
        InvalidRequest: There is no such model, its files are damaged, or the device or the dtype
            does not exist here.
        UnsupportedModelError: The model cannot be served exactly; names what is not supported.
    """
    torch_device = _parse_device(device)
    if dtype != "auto" and dtype not in DTYPES:
        raise InvalidRequest(f"dtype must be auto, {', '.join(DTYPES)}; got {dtype!r}.")
    with _quiet_transformers():
        folder = resolve(name, report)
        try:
            config = _load_config(folder)
            check_supported(config)
            tokenizer = _load_tokenizer(folder)
            model = _load_weights(
                folder, config, _choose_dtype(dtype, torch_device, config), torch_device
            )
        except (OSError, SafetensorError) as error:
            raise InvalidRequest(f"The model in {folder} cannot be read: {error}") from error
        return _describe(name, folder, model, tokenizer)


def resolve(name: str, report: Report = _silent) -> Path:
    """Finds the folder that a name leads to; converts or downloads when that is needed.

    Raises:
        InvalidRequest: The name leads nowhere; the message says what would.
        UnsupportedModelError: It leads to a GGUF file that cannot be converted.
    """
    if (alias := ALIASES.get(name)) is not None:
        packaged = alias.find_packaged()
        if packaged is None:
            return hub.fetch_snapshot(alias.hub_id, report)
        return _convert(packaged, report)
    path = Path(name).expanduser()
    if name and path.is_dir():
        if not hub.has_weights(path):
            raise InvalidRequest(f"{path} lacks a config.json, or some of its safetensors.")
        return path
    if path.is_file() and path.suffix == ".gguf":
        return _convert(path, report)
    if _looks_like_hub_id(name):
        return hub.fetch_snapshot(name, report)
    raise InvalidRequest(
        f"There is no model {name!r}: no such folder, and no such .gguf file. Known aliases are "
        f"{', '.join(sorted(ALIASES))}; a model on the Hugging Face Hub is named owner/name."
    )


def _convert(source: Path | GgufSource, report: Report) -> Path:
    # Imported here: a folder of safetensors needs no converter.
    from agentkv.model.gguf import convert_gguf

    return convert_gguf(source, report=report)


def _looks_like_hub_id(name: str) -> bool:
    parts = name.split("/")
    return len(parts) == 2 and all(parts) and parts[0] not in (".", "..", "~")


def _parse_device(device: str) -> torch.device:
    try:
        parsed = torch.device(device)
    except RuntimeError as error:
        raise InvalidRequest(f"torch knows no device {device!r}; try cpu or cuda.") from error
    if parsed.type == "cuda" and not torch.cuda.is_available():
        raise InvalidRequest("No CUDA device is available; use the device cpu.")
    if parsed.type == "cuda" and (parsed.index or 0) >= torch.cuda.device_count():
        raise InvalidRequest(
            f"There is no device {device}; this computer has {torch.cuda.device_count()} of them, "
            "counted from 0."
        )
    return parsed


def _choose_dtype(dtype: str, device: torch.device, config: PreTrainedConfig) -> torch.dtype:
    if dtype != "auto":
        return DTYPES[dtype]
    stored: object = getattr(config, "dtype", None)
    if device.type == "cpu" or not isinstance(stored, torch.dtype):
        return torch.float32
    return stored


def _load_config(folder: Path) -> PreTrainedConfig:
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except ValueError as error:  # an unknown model type, or one that needs its own code
        raise UnsupportedModelError(
            f"transformers cannot read the config in {folder} without running the model's own "
            f"code: {error}"
        ) from error
    return config


def _load_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """Loads the tokenizer, by preference exactly as `tokenizer.json` says.

    The automatic choice of a class is the second one: some classes build the pre-tokenizer anew
    and forget what the file says about it.
    """
    if (folder / "tokenizer.json").is_file():
        tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    else:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise UnsupportedModelError(
            f"The tokenizer in {folder} has no fast implementation; save it as tokenizer.json."
        )
    return tokenizer


def _load_weights(
    folder: Path, config: PreTrainedConfig, dtype: torch.dtype, device: torch.device
) -> PreTrainedModel:
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        folder,
        config=config,
        dtype=dtype,
        trust_remote_code=False,
        use_safetensors=True,
        ignore_mismatched_sizes=True,  # reported below, by name
        output_loading_info=True,
    )
    model, info = loaded
    # transformers fills what is missing with random numbers and goes on.
    absent = [*sorted(info["missing_keys"]), *sorted(key[0] for key in info["mismatched_keys"])]
    if absent:
        raise InvalidRequest(
            f"The safetensors in {folder} do not fit the model: {', '.join(absent[:5])}."
        )
    try:
        on_device = model.to(device).eval()
    except torch.OutOfMemoryError as error:
        size = sum(weight.nbytes for weight in model.parameters())
        raise InvalidRequest(
            f"The weights in {folder} take {size / 2**30:.2f} GiB, which {device} has not free; "
            "load them as bfloat16, or use another device."
        ) from error
    assert isinstance(on_device, PreTrainedModel)
    return on_device


def _describe(
    name: str, folder: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast
) -> LoadedModel:
    config: Any = model.config.get_text_config()
    max_length = getattr(config, "max_position_embeddings", None)
    if not max_length:
        raise UnsupportedModelError(f"The config in {folder} does not say the longest context.")
    untyped: Any = model
    return LoadedModel(
        name=name,
        model=model,
        tokenizer=tokenizer,
        folder=folder,
        architecture=type(model).__name__,
        vocab_size=int(untyped.get_output_embeddings().weight.shape[0]),
        max_length=int(max_length),
        num_layers=int(config.num_hidden_layers),
        dtype=model.dtype,
        device=model.device,
        eos_token_ids=_eos_token_ids(model.generation_config, tokenizer),
        weight_bytes=sum(weight.nbytes for weight in model.parameters()),
    )


def _eos_token_ids(
    generation: GenerationConfig | None, tokenizer: PreTrainedTokenizerFast
) -> tuple[int, ...]:
    """Collects what ends generation: a chat model's config often names its base's end alone."""
    named: object = getattr(generation, "eos_token_id", None)
    listed = named if isinstance(named, list) else [named]
    ends = {int(token) for token in (*listed, tokenizer.eos_token_id) if token is not None}
    return tuple(sorted(ends))


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Keeps transformers' progress bars and advice off the terminal while a model loads."""
    logging: Any = transformers_logging  # its functions carry no types
    verbosity = logging.get_verbosity()
    had_bar = logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if had_bar:
            logging.enable_progress_bar()
