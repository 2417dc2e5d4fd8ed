"""Layers of a model with 8-bit weights in place of its own: projections, embedding, head.

It takes a model's plain linear layers over, at load, and lets the originals go. Layers it does not
understand stay as they are. Projections of one input are packed together, so that whoever computes
a whole layer at once (`fused_layer`) finds them in one piece; each remains a layer of its own, with
a view.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, TypeGuard

from torch import Tensor, nn

from agentkv_kernels.int8_weights import PANEL, Int8Products, Int8Weights, Norm, fits

IN_A_ROW = ("q_proj", "k_proj", "v_proj")
"""Projections of one input whose outputs follow each other."""
IN_TURN = ("gate_proj", "up_proj")
"""Projections of one input whose outputs are multiplied: 32 of one, then 32 of the other."""


class Int8Linear(nn.Module):
    """A linear layer with 8-bit weights."""

    def __init__(
        self,
        plain: nn.Linear,
        products: Int8Products,
        weights: Int8Weights,
        group: Int8Weights | None = None,
    ) -> None:
        """Takes the place of a plain layer.

        Args:
            plain: The layer; its bias is kept.
            products: Multiplies.
            weights: Of this layer.
            group: Of all layers packed with it, or None where it stands alone.
        """
        super().__init__()
        self.in_features = plain.in_features
        self.out_features = plain.out_features
        self.bias = plain.bias
        self.weights = weights
        self.group = group or weights
        self._products = products
        self.train(plain.training)

    def forward(self, input: Tensor) -> Tensor:
        """Projects (..., in_features) to (..., out_features), float32."""
        return self._products.linear(input, self.weights, self.bias)

    def normalised(self, input: Tensor, norm: Norm) -> Tensor:
        """Does the same behind a norm of the input."""
        return self._products.linear(input, self.weights, self.bias, norm)


class Int8Embedding(nn.Module):
    """An embedding that reads the 8-bit weights of the head it is tied to."""

    def __init__(self, products: Int8Products, weights: Int8Weights) -> None:
        """Takes the weights of the head, (vocab_size, hidden_size), and what reads them."""
        super().__init__()
        self.weights = weights
        self._products = products

    def forward(self, input: Tensor) -> Tensor:
        """Returns the vectors of some tokens, (*input.shape, hidden_size) float32."""
        return self._products.rows(input, self.weights)


def quantise_linears(model: nn.Module, products: Int8Products) -> int:
    """Rounds the weights of every plain linear layer of a float32 model to 8 bits, in place.

    Layers with hooks, of a subclass, or whose inputs are not a multiple of 64 stay as they are.

    Returns:
        Bytes that the 8-bit weights take; 0 when no layer was understood.
    """
    num_bytes = _quantise_tied_head(model, products)
    uses = Counter(id(weight) for _, weight in model.named_parameters(remove_duplicate=False))
    for parent in list(model.modules()):
        for names in (IN_A_ROW, IN_TURN):
            members = [getattr(parent, name, None) for name in names]
            linears = [member for member in members if _is_plain(member, uses)]
            if len(linears) == len(names) and _lie_together(linears, in_turn=names == IN_TURN):
                num_bytes += _quantise_group(parent, names, linears, products)
        for name, child in list(parent.named_children()):
            if _is_plain(child, uses):
                weights = Int8Weights.pack(child.weight.detach(), products.native)
                setattr(parent, name, Int8Linear(child, products, weights))
                num_bytes += weights.nbytes
    return num_bytes


def _quantise_tied_head(model: Any, products: Int8Products) -> int:
    """Rounds a head that shares its weight with the embedding, for both."""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if type(head) is not nn.Linear or type(embedding) is not nn.Embedding:
        return 0  # a subclass may scale what it looks up
    if head.weight is not embedding.weight or not fits(head.in_features):
        return 0
    weights = Int8Weights.pack(head.weight.detach(), products.native)
    model.set_output_embeddings(Int8Linear(head, products, weights))
    model.set_input_embeddings(Int8Embedding(products, weights))
    return weights.nbytes


def _quantise_group(
    parent: nn.Module,
    names: Sequence[str],
    linears: Sequence[nn.Linear],
    products: Int8Products,
) -> int:
    plain = [linear.weight.detach() for linear in linears]
    if tuple(names) == IN_TURN:
        group = Int8Weights.pack_in_turn(plain, products.native)
        parts = [group.part(index, len(group.panels), len(names)) for index in range(len(names))]
    else:
        group = Int8Weights.pack_in_a_row(plain, products.native)
        parts = list(_consecutive(group, [linear.out_features for linear in linears]))
    for name, linear, part in zip(names, linears, parts, strict=True):
        setattr(parent, name, Int8Linear(linear, products, part, group))
    return group.nbytes


def _consecutive(group: Int8Weights, sizes: Sequence[int]) -> Iterator[Int8Weights]:
    start = 0
    for size in sizes:
        yield group.part(start // PANEL, (start + size) // PANEL)
        start += size


def _lie_together(linears: Sequence[nn.Linear], *, in_turn: bool) -> bool:
    sizes = [linear.out_features for linear in linears]
    return (
        all(size % PANEL == 0 for size in sizes)
        and len({linear.in_features for linear in linears}) == 1
        and (len(set(sizes)) == 1 or not in_turn)
    )


def _is_plain(member: object, uses: Counter[int]) -> TypeGuard[nn.Linear]:
    """Whether a member is a linear layer and nothing more, with weights that can be rounded."""
    if type(member) is not nn.Linear:  # a subclass may hold its weight in another form
        return False
    hooks = (member._forward_hooks, member._forward_pre_hooks)
    return (
        not any(hooks)
        and fits(member.in_features)
        and all(uses[id(weight)] == 1 for weight in member.parameters())
    )
