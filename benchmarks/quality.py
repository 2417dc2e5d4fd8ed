"""What rounded weights cost: perplexity of a fixed text, and how often greedy choices agree.

The text is chapters II and III of Alice's Adventures in Wonderland (Lewis Carroll, 1865, in the
public domain), in windows of 512 tokens that know nothing of each other. Figures are compared with
those of the weights as loaded, in float32. The choice `auto` of a server rests on this.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from agentkv.model.loader import load_model
from agentkv.model.model_shape import describe_model
from agentkv.model.weights import WeightKind, convert_weights
from agentkv_kernels.native import load_native
from benchmarks.report import Report, Result, Target, parser_for

TEXT = Path(__file__).with_name("text") / "alice.txt"
WINDOW = 512
LARGEST_LOSS = 1.01
"""Perplexity over that of float32."""


class Reading(NamedTuple):
    """What a model made of the text."""

    perplexity: float
    choices: Tensor
    """The most likely token at each position, (num_tokens,)."""


def main() -> None:
    """Reads the text with each kind of weights and publishes the report."""
    parser = parser_for(__doc__ or "")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--tokens", type=int, default=1 << 20, help="most tokens of the text")
    options = parser.parse_args()
    kinds: Sequence[WeightKind | None] = (None, "bf16", "int8")
    readings = {kind or "fp32": read(options.model, kind, options.tokens) for kind in kinds}
    exact = readings["fp32"]
    results, targets = [], []
    workload = f"{TEXT.stem}, {len(exact.choices)} tokens"
    for name, reading in readings.items():
        same = float((reading.choices == exact.choices).double().mean())
        results += [
            Result.of(workload, name, "perplexity", "", [reading.perplexity]),
            Result.of(workload, name, "greedy choices that agree", "%", [100 * same]),
        ]
        if name != "fp32":
            loss = reading.perplexity / exact.perplexity
            targets.append(Target.at_most(f"perplexity of {name} over fp32", loss, LARGEST_LOSS))
    Report("quality", tuple(results), tuple(targets)).publish(options.json)


def read(model_name: str, kind: WeightKind | None, most_tokens: int) -> Reading:
    """Loads a model, makes its weights what is asked, and reads the text."""
    loaded = load_model(model_name, dtype="float32")
    model = loaded.model
    describe_model(model)
    convert_weights(model, kind, load_native())
    model.set_attn_implementation("sdpa")
    encoded: list[int] = loaded.tokenizer(TEXT.read_text(encoding="utf-8"))["input_ids"]
    tokens = torch.tensor(encoded[: most_tokens + 1])
    total, choices = 0.0, []
    with torch.inference_mode():
        for start in range(0, len(tokens) - 1, WINDOW):
            part = tokens[start : start + WINDOW + 1]
            logits: Tensor = model(part[None, :-1], use_cache=False).logits[0].float()
            total += float(nn.functional.cross_entropy(logits, part[1:], reduction="sum"))
            choices.append(logits.argmax(dim=-1))
    return Reading(math.exp(total / (len(tokens) - 1)), torch.cat(choices))


if __name__ == "__main__":
    main()
