"""Constrained generations over random schemas, forked in the middle, and their unforked twins.

Every generation runs through the real engine on a tiny random model, many at once. Its text must
parse and fit its schema. It is forked while it runs and after it has ended, at random positions;
each branch is given its parent's random stream and must then write what its parent wrote.

    python tests/constrained_twins.py 10000
"""

import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import NamedTuple

import jsonschema
from bench import TENANT, finish_of, text_of, tokens_of
from random_schemas import Schema, random_schema
from tiny_engines import TEXT_VOCAB_SIZE, TinyEngine
from tiny_models import build_tiny_model

from agentkv.config import SchedulerConfig
from agentkv.constraint import Continued, JsonSchema
from agentkv.core.request import FinishReason
from agentkv.engine.operations import Generation
from agentkv.engine.outputs import Update
from agentkv.sampling_params import SamplingParams

END = 2
MAX_LENGTH = 2048
MAX_TOKENS = 1200
"""More than any of the random schemas needs."""
AT_ONCE = 64


class Counts(NamedTuple):
    """What was run and compared."""

    num_generations: int
    num_branches: int
    num_tokens: int


@dataclass(eq=False)
class _Run:
    """One generation on one context."""

    schema: Schema
    seed: int
    prompt: list[int]
    context_id: str
    operation: Generation
    fork_after: int
    """Steps after which it is forked while it runs."""
    start: int
    """Length of the context before it."""
    updates: list[Update] = field(default_factory=list)
    num_steps: int = 0


class ConstrainedTwins:
    """One engine, and the generations that run on it."""

    def __init__(self) -> None:
        model = build_tiny_model(
            "llama", vocab_size=TEXT_VOCAB_SIZE, max_position_embeddings=MAX_LENGTH
        )
        self._tiny = TinyEngine(
            model,
            num_blocks=8192,
            block_size=16,
            max_length=MAX_LENGTH,
            scheduler=SchedulerConfig(max_running=2 * AT_ONCE),
            end_token_ids=[END],
        )
        self._engine = self._tiny.engine
        self._num_branches = self._num_tokens = 0

    def run(self, numbers: range) -> Counts:
        """Runs the generations of these numbers; each follows from its number alone.

        Raises:
            AssertionError: A text does not parse or fit, or a branch differs from its parent.
        """
        for first in range(numbers.start, numbers.stop, AT_ONCE):
            self._run_together(range(first, min(first + AT_ONCE, numbers.stop)))
        return Counts(len(numbers), self._num_branches, self._num_tokens)

    def _run_together(self, numbers: range) -> None:
        runs = [self._begin(number) for number in numbers]
        early: list[tuple[_Run, _Run]] = []
        while any(not run.operation.is_done for run in runs):
            self._step([*runs, *(branch for _, branch in early)])
            early += [
                (run, self._fork(run, None))
                for run in runs
                if run.num_steps == run.fork_after and not run.operation.is_done
            ]
        for run in runs:
            self._check_text(run)
        late = [(run, self._fork(run, at)) for run in runs for at in self._positions(run)]
        pairs = early + late
        while any(not branch.operation.is_done for _, branch in pairs):
            self._step([branch for _, branch in pairs])
        for run, branch in pairs:
            self._check_twin(run, branch)
        self._engine.check()
        everything = {run.context_id for run in runs} | {branch.context_id for _, branch in pairs}
        self._engine.contexts.release(TENANT, sorted(everything))
        self._num_branches += len(pairs)

    def _begin(self, number: int) -> _Run:
        random = Random(number)
        schema = random_schema(random)
        prompt = [random.randint(3, 250) for _ in range(random.randint(1, 20))]
        create = self._engine.run(self._engine.contexts.create(TENANT, prompt))
        context_id = create.answer.context.id
        grammar = self._engine.grammars.compile(JsonSchema(schema))
        operation = self._engine.inference.generate(
            TENANT, context_id, self._params(number, MAX_TOKENS), grammar=grammar
        )
        fork_after = random.randint(1, 20)
        return _Run(schema, number, prompt, context_id, operation, fork_after, len(prompt))

    def _params(self, number: int, max_tokens: int) -> SamplingParams:
        # Some ask for log-probabilities, which commits forced tokens one by one.
        return SamplingParams(
            temperature=1.5, seed=number, max_tokens=max_tokens, logprobs=number % 4 == 0
        )

    def _positions(self, run: _Run) -> Iterator[int]:
        """Draws a position inside what a run generated, if there is one."""
        length = len(tokens_of(run.updates))
        if length > 1:
            yield run.start + Random(run.seed + 1).randint(1, length - 1)

    def _fork(self, run: _Run, at: int | None) -> _Run:
        """Goes on from a position, or from the last committed token of one that runs."""
        (view,) = self._engine.contexts.fork(TENANT, run.context_id, at=at)
        parent = self._engine._store.get(TENANT, run.context_id)
        self._engine._store.get(TENANT, view.id).ordinal = parent.ordinal
        operation = self._engine.inference.generate(
            TENANT, view.id, self._params(run.seed, MAX_TOKENS), grammar=Continued()
        )
        return _Run(run.schema, run.seed, run.prompt, view.id, operation, -1, view.length)

    def _step(self, runs: Sequence[_Run]) -> None:
        self._engine.step()
        for run in runs:
            run.updates += run.operation.take_news()
            run.num_steps += 1

    def _check_text(self, run: _Run) -> None:
        finish, text = finish_of(run.updates), text_of(run.updates)
        where = f"number {run.seed}, schema {json.dumps(run.schema)}, text {text!r}"
        assert finish.reason is FinishReason.STOP, f"ended with {finish.reason}: {where}"
        try:
            jsonschema.validate(json.loads(text), run.schema)
        except (ValueError, jsonschema.ValidationError) as error:
            raise AssertionError(f"{error}: {where}") from error
        self._num_tokens += len(tokens_of(run.updates))

    def _check_twin(self, run: _Run, branch: _Run) -> None:
        expected = tokens_of(run.updates)[branch.start - run.start :]
        assert tokens_of(branch.updates) == expected, f"a branch of number {run.seed} differs"
        assert finish_of(branch.updates).reason is FinishReason.STOP


def main() -> None:
    """Runs as many generations as the command line asks for."""
    number, began = int(sys.argv[1]), time.perf_counter()
    counts = ConstrainedTwins().run(range(number))
    seconds = time.perf_counter() - began
    sys.stdout.write(f"{counts} in {seconds:.0f} s: all parse, all twins are equal\n")


if __name__ == "__main__":
    main()
