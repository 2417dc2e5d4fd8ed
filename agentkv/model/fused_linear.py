"""Computes projections of the same input by one matrix product: q, k and v; gate and up.

Models call their projections one by one. The first call computes all of them and the others fetch
their part, so that the models stay unchanged. Weights are packed once, at load, and each projection
keeps its weight as a view: there is no second copy. Whoever calls with another input gets his own
product, so nothing is assumed about the order of calls; only an input that is changed in place
between two of them would go unnoticed, and the golden check runs after this.
"""

from collections import Counter
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

GROUPS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Names under which modules hold projections of one input."""


def fuse_projections(model: nn.Module) -> int:
    """Packs the weights of every group of plain linear layers that fit each other.

    Quantised layers, layers with hooks and layers that share a weight with others stay as they are.

    Args:
        model: In evaluation mode, on its device; changed in place.

    Returns:
        How many groups were packed.
    """
    uses = Counter(id(weight) for _, weight in model.named_parameters(remove_duplicate=False))
    groups = list(_fitting_groups(model, uses))
    for module, names, members in groups:
        packed = _PackedWeights(members)
        for index, name in enumerate(names):
            setattr(module, name, FusedProjection(packed, index, members[index]))
    return len(groups)


class FusedProjection(nn.Linear):
    """One projection of a group: a linear layer as before, that computes the others' part too."""

    def __init__(self, packed: "_PackedWeights", index: int, plain: nn.Linear) -> None:
        """Takes the place of a plain layer.

        Args:
            packed: Of the group.
            index: Of this layer in it.
            plain: The layer.
        """
        has_bias = plain.bias is not None
        super().__init__(plain.in_features, plain.out_features, has_bias, device="meta")
        self.weight = nn.Parameter(packed.weights[index], requires_grad=False)
        if has_bias:
            self.bias = nn.Parameter(packed.biases[index], requires_grad=False)
        self.train(plain.training)
        self._packed = packed
        self._index = index

    def forward(self, input: Tensor) -> Tensor:
        """Projects (..., in_features) to (..., out_features), a view of the group's product."""
        return self._packed.part(self._index, input)


class _PackedWeights:
    """Weights of a group in one tensor, and the parts of the last product not yet fetched."""

    def __init__(self, members: Sequence[nn.Linear]) -> None:
        self._sizes = [member.out_features for member in members]
        weights: list[Tensor] = []
        biases: list[Tensor] = []
        for member in members:
            weights.append(member.weight.detach())
            if member.bias is not None:
                biases.append(member.bias.detach())
        self._weight = torch.cat(weights)
        self._bias = torch.cat(biases) if biases else None
        self.weights = torch.split(self._weight, self._sizes)
        """Views, one for each member."""
        self.biases = torch.split(self._bias, self._sizes) if self._bias is not None else ()
        """Views, one for each member, or none."""
        self._input: Tensor | None = None
        self._parts: dict[int, Tensor] = {}

    def part(self, index: int, given: Tensor) -> Tensor:
        """Fetches a member's part of the product of an input, which is computed if it is new."""
        if given is not self._input or index not in self._parts:
            product = nn.functional.linear(given, self._weight, self._bias)
            self._parts = dict(enumerate(torch.split(product, self._sizes, dim=-1)))
            self._input = given
        part = self._parts.pop(index)
        if not self._parts:  # nothing is kept alive beyond the last fetch
            self._input = None
        return part


def _fitting_groups(
    model: nn.Module, uses: Counter[int]
) -> Iterator[tuple[nn.Module, Sequence[str], list[nn.Linear]]]:
    for module in list(model.modules()):
        for names in GROUPS:
            members = [getattr(module, name, None) for name in names]
            plain = [member for member in members if _is_plain(member, uses)]
            linear = [member for member in plain if isinstance(member, nn.Linear)]
            if len(linear) == len(names) and len({_kind(member) for member in linear}) == 1:
                yield module, names, linear


def _is_plain(member: object, uses: Counter[int]) -> bool:
    """Whether a member is a linear layer and nothing more."""
    if type(member) is not nn.Linear:  # a subclass may hold its weight in another form
        return False
    hooks = (member._forward_hooks, member._forward_pre_hooks)
    return not any(hooks) and all(uses[id(weight)] == 1 for weight in member.parameters())


def _kind(member: nn.Linear) -> tuple[object, ...]:
    """What members of a group have in common."""
    weight = member.weight
    return member.in_features, member.bias is not None, weight.dtype, weight.device
