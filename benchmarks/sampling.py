"""What choosing tokens costs beside the model: a step of 16 branches of the embedded model.

    python -m benchmarks.sampling [--json FILE] [--quick]

One context is forked into 16 branches, and every branch decodes. The step is timed greedily; then
the sampler alone, on logits of the model, greedily and with each option, so that the noise of the
model's own time does not hide a millisecond. The overhead of options is what they add to greedy,
as a share of a step. Penalties count 600 different tokens, bias and bans name 300 each, 20,000
tokens are allowed by a mask. One thread, float32.

A constraint costs three things, timed together: masks for 16 branches that are at different places
of a JSON text, the sampler under them, and taking in the chosen tokens. In the engine the masks are
made beside the model's work; here nothing hides them.
"""

import json
import random
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, Final

import torch
from torch import Tensor

from agentkv.config import EngineConfig
from agentkv.constraint import JsonSchema
from agentkv.core.batch import Sample, Stream
from agentkv.core.token_counter import TokenCounter
from agentkv.core.token_rules import TokenRules, mask_of
from agentkv.engine.build import build_engine_for
from agentkv.engine.engine import Engine
from agentkv.engine.grammar import Grammar, GrammarMatcher
from agentkv.engine.mask_maker import MaskMaker
from agentkv.model.loader import LoadedModel, load_model
from agentkv.model.sampler import Sampler
from agentkv.sampling_params import SamplingParams
from agentkv_kernels.native import load_native
from benchmarks.report import Report, Result, Target, parser_for

TENANT: Final = "tenant"
NUM_BRANCHES: Final = 16
TEXT: Final = "Once upon a time a keeper of bees met a keeper of keys, and neither knew the other."
MOST_SHARE: Final = 10.0
"""Percent of a step that all options together may add."""
_PENALTIES: Final = {"repetition_penalty": 1.1, "presence_penalty": 0.1, "frequency_penalty": 0.1}
_LISTS: Final = {
    "logit_bias": tuple((token, 0.5) for token in range(1000, 1300)),
    "banned_token_ids": tuple(range(2000, 2300)),
}
OPTIONS: Final[Mapping[str, dict[str, Any]]] = MappingProxyType(
    {
        "greedy": {"temperature": 0.0},
        "temperature": {},
        "top-k 50": {"top_k": 50},
        "top-p 0.95": {"top_p": 0.95},
        "min-p 0.02": {"min_p": 0.02},
        "typical-p 0.9": {"typical_p": 0.9},
        "penalties, greedy": {"temperature": 0.0, **_PENALTIES},
        "bias and bans, greedy": {"temperature": 0.0, **_LISTS},
        "log-probabilities, greedy": {"temperature": 0.0, "logprobs": True},
        "top log-probabilities, greedy": {"temperature": 0.0, "logprobs": True, "top_logprobs": 20},
        "all without top-k": {"top_p": 0.95, "min_p": 0.02, "typical_p": 0.9, **_PENALTIES,
                              **_LISTS, "logprobs": True, "top_logprobs": 20},
        "all": {"top_k": 50, "top_p": 0.95, "min_p": 0.02, "typical_p": 0.9, **_PENALTIES,
                **_LISTS, "logprobs": True, "top_logprobs": 20},
    }
)  # fmt: skip


VALUE: Final = {
    "name": "Jane Doe",
    "age": 42,
    "tags": ["a keeper of bees", "a keeper of keys"],
    "address": {"street": "Main Street 12", "code": "12345"},
}
SCHEMA: Final = JsonSchema(
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 40},
            "age": {"type": "integer", "minimum": 0},
            "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 5},
            "address": {
                "type": "object",
                "properties": {
                    "street": {"type": "string"},
                    "code": {"type": "string", "pattern": "^[0-9]{5}$"},
                },
                "required": ["street", "code"],
                "additionalProperties": False,
            },
        },
        "required": ["name", "age", "tags", "address"],
        "additionalProperties": False,
    }
)


@dataclass(frozen=True, slots=True)
class Plan:
    """How much to measure."""

    num_steps: int = 40
    num_rounds: int = 30


QUICK = Plan(num_steps=2, num_rounds=1)


def main() -> None:
    """Measures, prints one table and writes the JSON file if one is asked for."""
    parser = parser_for(__doc__)
    parser.add_argument("--quick", action="store_true", help="few rounds: does it run at all?")
    options = parser.parse_args()
    torch.set_num_threads(1)
    config = EngineConfig(model="smollm2", num_blocks=512, num_threads=1)
    loaded = load_model(config.model, dtype=config.dtype, device=config.device, report=print)
    logits = _logits(loaded)
    engine = build_engine_for(loaded, config, report=print)
    measure(engine, logits, QUICK if options.quick else Plan()).publish(options.json)


def measure(engine: Engine, logits: Tensor, plan: Plan) -> Report:
    """Times greedy steps, then the sampler with each kind of options in turn.

    Args:
        engine: What decodes.
        logits: (16, vocab_size), float32, as a model gives them.
        plan: How much to measure.
    """
    steps = _steps(engine, plan.num_steps)
    cases = {name: _samples(logits.shape[1], options) for name, options in OPTIONS.items()}
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    sampler = Sampler(load_native())
    with torch.inference_mode():
        for number in range(plan.num_rounds + 1):
            for name, samples in cases.items():  # in turn: a busy machine disturbs all alike
                taken = _timed(partial(sampler.sample, logits, samples))
                if number > 0:  # the first round warms up
                    seconds[name].append(1e3 * taken)
    constrained = _constrained(engine, logits, plan.num_rounds)
    step = statistics.median(steps)
    greedy = statistics.median(seconds["greedy"])
    extra = {name: statistics.median(values) - greedy for name, values in seconds.items()}
    workload = f"{NUM_BRANCHES} rows of {logits.shape[1]}"
    return Report(
        "sampling",
        (
            Result.of("16 branches", "agentkv", "greedy step", "ms", steps),
            *(Result.of(workload, "agentkv", name, "ms", seconds[name]) for name in cases),
            Result.of(workload, "agentkv", "JSON schema, greedy", "ms", constrained),
        ),
        (
            Target.at_most("all options, % of a step", 100 * extra["all"] / step, MOST_SHARE),
            Target.at_most(
                "JSON schema, % of a step",
                100 * (statistics.median(constrained) - greedy) / step,
                MOST_SHARE,
            ),
        ),
    )


def _steps(engine: Engine, num_steps: int) -> list[float]:
    """Times steps of branches that decode greedily, in milliseconds."""
    root = _context(engine)
    params = SamplingParams(max_tokens=num_steps + 8, ignore_eos=True)
    operation = engine.inference.generate_branches(TENANT, root, NUM_BRANCHES, params)
    for _ in range(4):
        engine.step()
    taken = [1e3 * _timed(engine.step) for _ in range(num_steps)]
    engine.cancel(operation)
    return taken


def _context(engine: Engine) -> str:
    token_ids = [7 * position % 90 for position in range(200)]
    return engine.run(engine.contexts.create(TENANT, token_ids)).answer.context.id


def _logits(loaded: LoadedModel) -> Tensor:
    """Takes the logits of a text's last tokens from the model as it was loaded."""
    token_ids: Any = loaded.tokenizer(TEXT, return_tensors="pt").input_ids
    with torch.inference_mode():
        logits: Tensor = loaded.model(token_ids, use_cache=False).logits
    return logits[0, -NUM_BRANCHES:].float()


def _samples(vocab_size: int, options: dict[str, Any]) -> list[Sample]:
    params = SamplingParams(**({"temperature": 1.0} | options))
    dice = random.Random(1)
    counts = TokenCounter(dice.choices(range(vocab_size), k=600)).snapshot()
    masks = (mask_of(range(20_000), vocab_size),) if params.banned_token_ids else ()
    return [
        Sample(
            row=row,
            head=None,
            params=params,
            stream=Stream(7, row),
            position=100,
            rules=TokenRules.of(params, vocab_size),
            masks=masks,
            counts=counts if params.has_penalties else None,
        )
        for row in range(NUM_BRANCHES)
    ]


def _constrained(engine: Engine, logits: Tensor, num_rounds: int) -> list[float]:
    """Times masks, sampler and matchers of 16 branches under a schema, in milliseconds."""
    grammar = engine.grammars.compile(SCHEMA)
    masks, sampler, taken = MaskMaker(), Sampler(load_native()), list[float]()
    params = SamplingParams()
    for number in range(num_rounds + 1):
        matchers = [_matcher(grammar, number + row) for row in range(NUM_BRANCHES)]
        samples = [
            Sample(row, None, params, Stream(0, row), 100, allowed=matcher)
            for row, matcher in enumerate(matchers)
        ]

        def step(
            matchers: list[GrammarMatcher] = matchers, samples: list[Sample] = samples
        ) -> None:
            masks.begin(matchers)
            chosen = sampler.sample(logits, samples)
            for matcher, sampled in zip(matchers, chosen, strict=True):
                matcher.advance(sampled.token, 100)

        with torch.inference_mode():
            seconds = _timed(step)
        if number > 0:  # the first round warms up
            taken.append(1e3 * seconds)
    return taken


def _matcher(grammar: Grammar, place: int) -> GrammarMatcher:
    """Makes a matcher that has read the beginning of a value."""
    token_ids = grammar.tokenizer.tokenize_str(json.dumps(VALUE))
    matcher = GrammarMatcher(grammar, token_ids[: place % len(token_ids)], jumps=True)
    matcher.open()
    return matcher


def _timed(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
