"""Adapters beside a model's linear layers: rows of several adapters in one step.

    y = layer(x)                              every row, whatever the layer's weights are kept as
    y[rows] += x[rows] @ down.T @ up.T        for each group of rows that has an adapter

Layers are replaced by wrappers at load, so models stay unchanged. Which rows have which adapter is
told before each step to one object that all wrappers of a model hold. It knows no files.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from agentkv.core.batch import AdapterRows
from agentkv.errors import UnsupportedModelError
from agentkv.model.adapter_files import Adapter, LowRank


class AdapterStep:
    """Which rows of the step that runs have an adapter."""

    def __init__(self, names: Sequence[str] = ()) -> None:
        self.names = tuple(names)
        """All adapters there are, in the order given."""
        self.groups: tuple[AdapterRows, ...] = ()
        self.num_rows = 0
        """Rows of the step, padded ones included."""
        self.everywhere: str | None = None
        """An adapter that all rows of all sequences have, whatever the groups say."""

    def begin(self, groups: tuple[AdapterRows, ...], num_rows: int) -> None:
        """Tells what the next pass computes."""
        assert all(group.adapter in self.names for group in groups)
        self.groups, self.num_rows = groups, num_rows

    @contextmanager
    def merged(self, name: str) -> Iterator[None]:
        """Makes the model compute with an adapter as if it was part of the weights."""
        self.groups, self.everywhere = (), name or None
        try:
            yield
        finally:
            self.everywhere = None


class LoraLinear(nn.Module):
    """A linear layer with adapters beside it."""

    def __init__(self, name: str, base: nn.Module, step: AdapterStep) -> None:
        """Takes the place of a layer.

        Args:
            name: Of the module, for messages.
            base: The layer; it may be replaced by one with smaller weights.
            step: Told which rows have which adapter.
        """
        super().__init__()
        self.base = base
        self.parts: dict[str, LowRank] = {}
        """What each adapter adds here, in the dtype of the layer."""
        self._name = name
        self._step = step
        self.train(base.training)

    def forward(self, input: Tensor) -> Tensor:
        """Projects (..., num_rows, in_features) to (..., num_rows, out_features)."""
        output: Tensor = self.base(input)
        if self._step.everywhere is not None:
            part = self.parts.get(self._step.everywhere)
            return output if part is None else output + input @ (part.up @ part.down).T
        for group in self._step.groups:
            part = self.parts.get(group.adapter)
            if part is not None:
                self._check_rows(input)
                end = group.first_row + group.num_rows
                rows = input[..., group.first_row : end, :]
                output[..., group.first_row : end, :] += rows @ part.down.T @ part.up.T
        return output

    def _check_rows(self, input: Tensor) -> None:
        """Refuses layers that see the step's rows in another order or number.

        Raises:
            UnsupportedModelError: Names the layer, for example one of an expert.
        """
        if input.shape[-2] != self._step.num_rows:
            raise UnsupportedModelError(
                f"{self._name} computes {input.shape[-2]} of {self._step.num_rows} rows, so that "
                "an adapter cannot tell whose they are. Merge the adapter into the model."
            )


def install_adapters(model: PreTrainedModel, adapters: Sequence[Adapter]) -> AdapterStep:
    """Puts adapters beside the layers that they change, in place.

    Args:
        model: In evaluation mode, on its device, its weights as loaded.
        adapters: Of different names.

    Raises:
        UnsupportedModelError: An adapter does not fit the model; nothing was changed then.
    """
    plain = dict(model.named_modules())
    for adapter in adapters:
        _check_fit(model, plain, adapter)
    step = AdapterStep([adapter.name for adapter in adapters])
    for adapter in adapters:
        for name, part in adapter.parts.items():
            _wrap(model, plain, name, step).parts[adapter.name] = _beside(plain[name], part)
    return step


def _check_fit(model: PreTrainedModel, plain: Mapping[str, nn.Module], adapter: Adapter) -> None:
    untyped: Any = model
    head = untyped.get_output_embeddings()
    for name, part in adapter.parts.items():
        layer = plain.get(name)
        if layer is None:
            raise UnsupportedModelError(
                f"The adapter {adapter.name} changes {name}, which {type(model).__name__} lacks; "
                "it was trained for another model."
            )
        if type(layer) is not nn.Linear or layer is head:
            raise UnsupportedModelError(
                f"The adapter {adapter.name} changes {name}; only linear layers before the head "
                f"can have adapters, and this is {type(layer).__name__}."
            )
        shape = (part.up.shape[0], part.down.shape[1])
        if shape != tuple(layer.weight.shape):
            raise UnsupportedModelError(
                f"The adapter {adapter.name} was trained for another model: {name} is "
                f"{tuple(layer.weight.shape)}, not {shape}."
            )


def _wrap(
    model: PreTrainedModel, plain: Mapping[str, nn.Module], name: str, step: AdapterStep
) -> LoraLinear:
    """Finds the wrapper of a layer, or makes it."""
    parent, _, last = name.rpartition(".")
    owner = model.get_submodule(parent)
    known = getattr(owner, last)
    if isinstance(known, LoraLinear):
        return known
    made = LoraLinear(name, plain[name], step)
    setattr(owner, last, made)
    return made


def _beside(layer: nn.Module, part: LowRank) -> LowRank:
    weight = layer.weight
    assert isinstance(weight, Tensor)
    return replace(part, down=part.down.to(weight), up=part.up.to(weight))
