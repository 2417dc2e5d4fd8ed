"""Every supported family on shared blocks against plain transformers on each branch's tokens.

The slow twin of the model layer: eager attention, one branch at a time, nothing cached.
"""

from random import Random
from typing import Any

import pytest
import torch
from hand_forked import HandBranch, HandForked
from tiny_models import PROVEN_FAMILIES, VOCAB_SIZE, WINDOW, build_tiny_model
from torch import Tensor
from transformers import PreTrainedModel, T5Config, T5ForConditionalGeneration

from agentkv.errors import UnsupportedModelError
from agentkv.model.model_shape import describe_model

TOLERANCE = 1e-4


class Compared:
    """Branches with the logits of every token, to compare at the end."""

    def __init__(self, model: PreTrainedModel, *, block_size: int, **options: Any) -> None:
        self.forked = HandForked(model, block_size=block_size, **options)
        self.logits: dict[HandBranch, list[Tensor]] = {}
        self._random = Random(1)

    def create(self) -> HandBranch:
        branch = self.forked.create()
        self.logits[branch] = []
        return branch

    def fork(self, parent: HandBranch, at: int | None = None) -> HandBranch:
        child = self.forked.fork(parent, at)
        self.logits[child] = [torch.cat(self.logits[parent])[: len(child.tokens)]]
        return child

    def step(self, *work: tuple[HandBranch, int]) -> None:
        """Runs that many random tokens of each branch in one batch."""
        chosen = [
            (branch, [self._random.randrange(VOCAB_SIZE) for _ in range(num_tokens)])
            for branch, num_tokens in work
        ]
        answers = self.forked.step(*chosen)
        for (branch, _), logits in zip(work, answers, strict=True):
            self.logits[branch].append(logits)

    def check(self) -> None:
        for branch, parts in self.logits.items():
            expected = self.forked.expected(branch)
            torch.testing.assert_close(torch.cat(parts), expected, rtol=0, atol=TOLERANCE)
            torch.testing.assert_close(
                self.forked.again(branch), expected[-1], rtol=0, atol=TOLERANCE
            )


@pytest.mark.parametrize("family", PROVEN_FAMILIES)
@pytest.mark.parametrize(
    ("implementation", "block_size"), [("reference", 4), ("cpu", 4), ("cpu", 16)]
)
def test_branches_equal_their_tokens_run_alone(
    family: str, implementation: str, block_size: int
) -> None:
    """Catches any leak between branches, a wrong cut or copy, and every slot read unwritten.

    Chunked prefill, a fork at the head and one inside a sealed block, steps that mix chunks of
    different length with decodes, a fork of a fork, and each last token recomputed in place; the
    pool is NaN wherever nothing was written.
    """
    run = Compared(build_tiny_model(family), block_size=block_size, implementation=implementation)
    root, stranger = run.create(), run.create()
    run.step((root, 7), (stranger, 2))
    run.step((root, 3))
    child, early = run.fork(root), run.fork(root, at=6)
    run.step((root, 3), (child, 1), (early, 5), (stranger, 1))
    grandchild = run.fork(child)
    run.step((root, 1), (child, 1), (grandchild, 2), (early, 1))
    run.step((root, 1), (child, 1), (grandchild, 1), (early, 1), (stranger, 6))
    run.check()


@pytest.mark.parametrize("block_size", [4, 16])
@pytest.mark.parametrize("chunk", [1, 2, 3, 8, 9])
def test_case_076_window_is_right_at_and_around_its_length(block_size: int, chunk: int) -> None:
    """Catches a window one too long or short where the length reaches it (B below and above it)."""
    run = Compared(build_tiny_model("mistral"), block_size=block_size)
    branch = run.create()
    run.step((branch, 6))
    while len(branch.tokens) < WINDOW + 4:
        run.step((branch, chunk))
    other = run.fork(branch, at=WINDOW - 1)
    run.step((other, 1), (branch, 1))
    run.step((other, 1), (branch, 1))
    run.check()


def test_case_077_global_layers_keep_what_lies_before_the_window() -> None:
    """Catches the window of some layers applied to all: token 0 would stop to matter."""

    def last_logits(first_token: int, layer_types: list[str]) -> Tensor:
        model = build_tiny_model("gemma3", num_hidden_layers=4, layer_types=layer_types)
        forked = HandForked(model)
        branch = forked.create()
        (logits,) = forked.step((branch, [first_token, *range(10, 73)]))
        torch.testing.assert_close(logits, forked.expected(branch), rtol=0, atol=TOLERANCE)
        last: Tensor = logits[-1]
        return last

    mixed = ["sliding_attention", "full_attention"] * 2
    change = (last_logits(3, mixed) - last_logits(4, mixed)).abs().max()
    assert change > 10 * TOLERANCE
    windowed = ["sliding_attention"] * 4
    assert torch.equal(last_logits(3, windowed), last_logits(4, windowed))


def test_shapes_are_what_the_layers_hand_over() -> None:
    """Catches KV sized by a configuration field that means something else in this family."""
    shape = describe_model(build_tiny_model("gemma4_two_dims"))
    assert [(layer.num_kv_heads, layer.head_dim) for layer in shape.layers] == [(2, 8), (2, 16)]
    assert shape.windows == (WINDOW,)
    assert shape.vocab_size == VOCAB_SIZE
    assert shape.dtype == torch.float32
    assert describe_model(build_tiny_model("gpt2")).layers[0].num_kv_heads == 4


def test_layers_that_share_kv_name_their_donor() -> None:
    """Catches KV stored twice, and a donor of the wrong layer type."""
    shape = describe_model(build_tiny_model("gemma3n"))
    assert [layer.donor for layer in shape.layers] == [0, 1, 0, 1]
    shape = describe_model(build_tiny_model("llama"))
    assert [layer.donor for layer in shape.layers] == [0, 1]


@pytest.mark.parametrize(
    ("family", "changes", "what"),
    [
        ("falcon", {}, "FalconForCausalLM"),
        ("llama4", {}, "Llama4ForCausalLM has layers of type chunked_attention"),
        (
            "deepseek_v3",
            {"v_head_dim": 16},
            "DeepseekV3ForCausalLM, layer 0: keys have 12 dimensions and values 16",
        ),
        (
            "llama",
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10_000.0}},
            "LlamaForCausalLM uses dynamic rotary",
        ),
    ],
)
def test_unsupported_families_are_refused_by_name(
    family: str, changes: dict[str, Any], what: str
) -> None:
    """Catches a family that is served although it is known to come out wrong."""
    model = build_tiny_model(family, **changes)
    with pytest.raises(UnsupportedModelError, match=what):
        describe_model(model)


def test_encoder_decoders_and_headless_models_are_refused() -> None:
    """Catches models that do not predict the next token of their input."""
    config = T5Config(vocab_size=VOCAB_SIZE, d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=2)
    with pytest.raises(UnsupportedModelError, match="encoder-decoder"):
        describe_model(T5ForConditionalGeneration(config))
    headless = build_tiny_model("llama").base_model
    assert isinstance(headless, PreTrainedModel)
    with pytest.raises(UnsupportedModelError, match="logits_to_keep"):
        describe_model(headless)
