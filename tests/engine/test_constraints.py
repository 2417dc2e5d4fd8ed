"""Constrained generation through the engine: what is committed, when it ends, and who is hurt."""

import json
from collections.abc import Sequence
from typing import Any

import pytest
from bench import TENANT, finish_of, text_of, tokens_of
from tiny_engines import TEXT_VOCAB_SIZE, TinyEngine
from tiny_models import build_tiny_model

from agentkv.constraint import Choices, Constraint, Continued, JsonSchema, Lark, Regex
from agentkv.core.request import FinishReason
from agentkv.engine.grammar import GrammarMatcher
from agentkv.engine.operations import Generation
from agentkv.engine.outputs import Chunk, Update
from agentkv.errors import AgentKVError, InvalidRequest, Reason
from agentkv.sampling_params import SamplingParams

END = 2
PERSON = JsonSchema(
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 5},
            "age": {"type": "integer", "minimum": 0, "maximum": 120},
        },
        "required": ["name", "age"],
        "additionalProperties": False,
    }
)


class Constrained:
    """A tiny engine whose tokens are bytes of text, and short verbs."""

    def __init__(self, *, num_blocks: int = 256, **settings: Any) -> None:
        model = build_tiny_model("llama", vocab_size=TEXT_VOCAB_SIZE)
        tiny = TinyEngine(model, num_blocks=num_blocks, end_token_ids=[END], **settings)
        self.engine = tiny.engine

    def create(self, text: str = "hello") -> str:
        ids = self.engine.tokenizer.encode(text)
        return self.engine.run(self.engine.contexts.create(TENANT, ids)).answer.context.id

    def extend(self, context_id: str, text: str) -> None:
        ids = self.engine.tokenizer.encode(text)
        self.engine.run(self.engine.contexts.extend(TENANT, context_id, ids))

    def start(self, context_id: str, constraint: Constraint | None, **options: Any) -> Generation:
        grammar = (
            constraint
            if constraint is None or isinstance(constraint, Continued)
            else self.engine.grammars.compile(constraint)
        )
        params = SamplingParams(**{"temperature": 1.0, "seed": 3, "max_tokens": 100, **options})
        return self.engine.inference.generate(TENANT, context_id, params, grammar=grammar)

    def generate(
        self, context_id: str, constraint: Constraint | None, **options: Any
    ) -> Sequence[Update]:
        return self.finish(self.start(context_id, constraint, **options))

    def finish(self, *operations: Generation) -> Sequence[Update]:
        """Steps until all are done; returns the updates of the first."""
        while not all(operation.is_done for operation in operations):
            self.engine.step()
            self.engine.check()
        return operations[0].take_news()

    def text(self, context_id: str) -> str:
        return self.engine.tokenizer.decode(self.engine.observer.tokens(TENANT, context_id))

    def fork(self, context_id: str, at: int | None = None) -> str:
        """Forks one branch that draws from its parent's random stream."""
        (view,) = self.engine.contexts.fork(TENANT, context_id, at=at)
        store = self.engine._store
        store.get(TENANT, view.id).ordinal = store.get(TENANT, context_id).ordinal
        return view.id


@pytest.mark.parametrize(
    ("constraint", "fits"),
    [
        (PERSON, lambda text: set(json.loads(text)) == {"name", "age"}),
        (Regex("[ab]{3}c+"), lambda text: text[:3].strip("ab") == "" and text[3:].strip("c") == ""),
        (Choices(["yes", "no", "no way"]), lambda text: text in ("yes", "no", "no way")),
        (Lark('start: "x" NUM\nNUM: /[0-9]{2,3}/'), lambda text: text[0] == "x" and int(text[1:])),
    ],
)
def test_each_form_of_constraint_holds(constraint: Constraint, fits: Any) -> None:
    """Catches a form that is translated into another grammar, or none."""
    bench = Constrained()
    updates = bench.generate(bench.create(), constraint)
    assert finish_of(updates).reason is FinishReason.STOP
    assert fits(text_of(updates))


def test_tokens_that_leave_no_choice_come_in_one_step() -> None:
    """Catches a jump that commits other tokens, drops their text, or does not happen."""
    bench = Constrained()
    context_id = bench.create()
    updates = bench.generate(context_id, PERSON)
    sizes = [len(update.token_ids) for update in updates if isinstance(update, Chunk)]
    tokens = tokens_of(updates)
    assert bench.engine.observer.get(TENANT, context_id).length == len("hello") + len(tokens)
    assert bench.text(context_id) == "hello" + text_of(updates)
    assert finish_of(updates).usage.generated_tokens == len(tokens)
    operation = bench.start(bench.create(), PERSON)
    bench.engine.step()
    (chunk,) = operation.take_news()
    assert isinstance(chunk, Chunk)
    assert chunk.text == '{"name": "' and chunk.token_ids == tuple(tokens[: len(chunk.token_ids)])
    assert sum(sizes) == len(tokens)


def test_log_probabilities_do_not_change_what_is_written() -> None:
    """Catches a run that is split otherwise token by token, and log-probabilities under a mask."""
    bench = Constrained()
    jumped = bench.generate(bench.create(), PERSON)
    context_id = bench.create()
    scored = bench.generate(context_id, PERSON, logprobs=True)
    tokens = tokens_of(scored)
    assert tokens == tokens_of(jumped)
    logprobs = [
        value for update in scored if isinstance(update, Chunk) for value in update.logprobs
    ]
    plain = bench.engine.run(
        bench.engine.inference.score(TENANT, bench.create(), [tokens])
    ).answer.scores[0]
    assert logprobs == pytest.approx(plain.logprobs, abs=1e-4)


def test_a_stop_text_inside_a_forced_run_takes_back_what_follows() -> None:
    """Catches tokens that stay committed behind a stop because they came in the same step."""
    bench = Constrained()
    context_id = bench.create()
    updates = bench.generate(context_id, PERSON, stop=('me":',))
    finish = finish_of(updates)
    assert (finish.reason, finish.stop, finish.num_tokens_before_stop) == (
        FinishReason.STOP,
        'me":',
        4,
    )
    assert text_of(updates) == '{"na'
    assert bench.text(context_id) == 'hello{"name":'
    assert finish.context is not None and finish.context.length == 5 + len(tokens_of(updates))
    assert finish.usage.generated_tokens == len(tokens_of(updates))
    bench.engine.check()


def test_a_stop_token_inside_a_forced_run_ends_it() -> None:
    """Catches a stop token that is passed over because nobody sampled it."""
    bench = Constrained()
    (quote,) = bench.engine.tokenizer.encode("m")
    updates = bench.generate(bench.create(), PERSON, stop_token_ids=(quote,))
    assert text_of(updates) == '{"na' and tokens_of(updates)[-1] == quote
    assert finish_of(updates).num_tokens_before_stop == 4


@pytest.mark.parametrize("most", [1, 3, 12])
def test_max_tokens_holds_inside_a_forced_run(most: int) -> None:
    """Catches a run that goes beyond `max_tokens`."""
    bench = Constrained()
    context_id = bench.create()
    updates = bench.generate(context_id, PERSON, max_tokens=most)
    assert len(tokens_of(updates)) == most
    assert finish_of(updates).reason is FinishReason.LENGTH
    whole = bench.generate(bench.create(), PERSON)
    rest = bench.generate(context_id, Continued())
    assert tokens_of(updates) + tokens_of(rest) == tokens_of(whole)


def test_the_longest_context_holds_inside_a_forced_run() -> None:
    """Catches a run that goes beyond the model's longest context."""
    bench = Constrained(max_length=9)
    context_id = bench.create()
    updates = bench.generate(context_id, PERSON)
    assert finish_of(updates).reason is FinishReason.LENGTH
    assert bench.engine.observer.get(TENANT, context_id).length == 9


def test_the_callers_own_tokens_are_part_of_what_is_continued() -> None:
    """Catches a continuation that does not see what was extended in between."""
    bench = Constrained()
    context_id = bench.create()
    bench.generate(context_id, PERSON, max_tokens=4)
    bench.extend(context_id, 'me": "Ann", ')
    updates = bench.generate(context_id, Continued())
    assert text_of(updates).startswith('"age": ')
    assert json.loads(bench.text(context_id).removeprefix("hello"))["name"] == "Ann"


def test_text_that_does_not_fit_cannot_be_continued() -> None:
    """Catches a matcher in error whose mask allows nothing or everything, without a word."""
    bench = Constrained()
    context_id = bench.create()
    bench.generate(context_id, PERSON, max_tokens=4)
    bench.extend(context_id, "!")
    operation = bench.start(context_id, Continued())
    bench.finish(operation)
    assert isinstance(operation.error, InvalidRequest)
    assert operation.error.reason is Reason.GRAMMAR_REJECTED
    assert operation.error.metadata["position"] == "4"
    assert bench.text(context_id) == 'hello{"na!'


def test_truncating_takes_the_grammar_back() -> None:
    """Catches a matcher that stays ahead of a context that was truncated."""
    bench = Constrained()
    context_id = bench.create()
    whole = tokens_of(bench.generate(context_id, PERSON))
    for kept in (len(whole) - 1, 11, 5, 0):
        bench.engine.contexts.truncate(TENANT, context_id, 5 + kept)
        assert tokens_of(bench.generate(context_id, Continued())) == whole[kept:]
    bench.engine.contexts.truncate(TENANT, context_id, 4)
    with pytest.raises(InvalidRequest, match="constrained generation before it"):
        bench.start(context_id, Continued())


def test_siblings_of_one_grammar_evolve_alone() -> None:
    """Catches state shared by the branches of one call: each text is whole and they differ."""
    bench = Constrained()
    grammar = bench.engine.grammars.compile(PERSON)
    operation = bench.engine.inference.generate_branches(
        TENANT,
        bench.create(),
        8,
        SamplingParams(temperature=1.0, seed=1, max_tokens=100),
        grammar=grammar,
    )
    updates = bench.finish(operation)
    texts = [text_of(updates, number) for number in range(8)]
    assert all(set(json.loads(text)) == {"name", "age"} for text in texts)
    assert len(set(texts)) == 8


def test_a_preempted_generation_keeps_its_place() -> None:
    """Catches a matcher that is lost, or advanced twice, when KV gives way and is recomputed."""
    wide, narrow = Constrained(), Constrained(num_blocks=24)
    alone = [wide.generate(wide.create(f"p{n}"), PERSON, seed=n) for n in range(6)]
    operations = [narrow.start(narrow.create(f"p{n}"), PERSON, seed=n) for n in range(6)]
    first = narrow.finish(*operations)
    assert narrow.engine.view().num_preemptions > 0
    together = [first, *(operation.take_news() for operation in operations[1:])]
    assert list(map(text_of, together)) == list(map(text_of, alone))


def test_a_matcher_over_its_limits_ends_its_own_stream_alone() -> None:
    """Catches a poisoned matcher that ends the step, and so its neighbours."""
    bench = Constrained()
    healthy = bench.start(bench.create("a"), PERSON)
    poisoned = bench.start(bench.create("b"), Regex("[a-z]{40}"))
    bench.engine.step()
    matcher = poisoned.requests[0].matcher
    assert isinstance(matcher, GrammarMatcher) and matcher._state is not None
    matcher._state.consume_token(END)  # not allowed there: the library's matcher is in error now
    bench.finish(poisoned)
    assert poisoned.error is not None and poisoned.error.reason is Reason.GRAMMAR_REJECTED
    updates = bench.finish(healthy)
    assert text_of(updates) == text_of(bench.generate(bench.create("a"), PERSON))


@pytest.mark.parametrize("where", [0, 4])
def test_a_text_that_no_token_continues_is_a_dead_end(where: int) -> None:
    """Catches a dead end answered with an error or a forbidden token, in a forced run as well."""
    bench = Constrained()
    (letter,) = bench.engine.tokenizer.encode("abcde"[where])
    updates = bench.generate(bench.create(), Regex("abcde"), banned_token_ids=(letter,))
    finish = finish_of(updates)
    assert finish.reason is FinishReason.DEAD_END and finish.error is None
    assert text_of(updates) == "abcde"[:where] and finish.usage.generated_tokens == where


def test_a_constraint_contradicts_ignore_eos() -> None:
    """Catches a generation that could never end."""
    bench = Constrained()
    context_id = bench.create()
    with pytest.raises(InvalidRequest) as caught:
        bench.start(context_id, PERSON, ignore_eos=True)
    assert set(caught.value.violations) == {"sampling.ignore_eos"}
    assert not bench.engine.observer.get(TENANT, context_id).is_busy


def test_a_refused_generation_leaves_the_grammar_before_it() -> None:
    """Catches a region that moves although the call was refused."""
    bench = Constrained()
    context_id = bench.create()
    first = tokens_of(bench.generate(context_id, PERSON, max_tokens=6))
    with pytest.raises(AgentKVError):
        bench.start(context_id, Choices(["a"]), stop_token_ids=(TEXT_VOCAB_SIZE,))
    rest = tokens_of(bench.generate(context_id, Continued()))
    assert first + rest == tokens_of(bench.generate(bench.create(), PERSON))


def test_no_token_beyond_the_tokenizer_is_chosen() -> None:
    """Catches a mask shorter than the logits whose missing bits allow everything."""
    bench = Constrained()
    known = bench.engine.tokenizer.vocab_size
    assert known < TEXT_VOCAB_SIZE
    updates = bench.generate(bench.create(), Regex("(.|\n){60}"), temperature=100.0)
    assert max(tokens_of(updates)) < known
