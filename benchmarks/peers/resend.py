"""Jobs for engines without forks: each node resends its path and trusts to the prefix cache.

It owns what is sent when; the engine behind it decodes one wave at a time.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.peers.protocol import Job, Outcome, peak_rss, reset_peak_rss


@dataclass(frozen=True, slots=True)
class Prompt:
    """One request of a wave."""

    token_ids: tuple[int, ...]
    num_tokens: int
    """Tokens to decode, at least 1."""
    count: int
    """Continuations to sample independently."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """One continuation."""

    token_ids: tuple[int, ...]
    first_token_at: float
    """`time.perf_counter()` when its first token was known."""


@dataclass(frozen=True, slots=True)
class Wave:
    """What came of the requests of a wave, in their order, `count` continuations for each."""

    samples: list[Sampled]
    computed_rows: int | None = None
    """Rows of the model it took; None if the engine does not tell."""


def run_resending(job: Job, decode: Callable[[Sequence[Prompt]], Wave]) -> Outcome:
    """Runs a job wave by wave; a path is what was given and what the engine itself decoded."""
    nodes = job.nodes
    paths: list[tuple[int, ...]] = []
    first_tokens: list[float] = []
    seconds: list[float] = []
    num_generated: list[int] = []
    rows: list[int | None] = [0]
    reset_peak_rss()
    for is_measured, numbers in job.numbered():
        begun = time.perf_counter()
        heads = []
        for number in numbers:
            parent, at = nodes[number].parent, nodes[number].at
            kept = () if parent is None else paths[parent][:at]
            heads.append(kept + nodes[number].given)
        wave = decode(_grouped(heads, [nodes[number].decode for number in numbers]))
        for number, head, sampled in zip(numbers, heads, wave.samples, strict=True):
            token_ids = sampled.token_ids if nodes[number].decode else ()
            paths.append(head + token_ids)
            num_generated.append(len(token_ids))
            if is_measured and token_ids:
                first_tokens.append(sampled.first_token_at - begun)
        if is_measured:
            seconds.append(time.perf_counter() - begun)
            rows.append(wave.computed_rows)
    told = [count for count in rows if count is not None]
    return Outcome(
        tuple(seconds),
        tuple(first_tokens),
        tuple(num_generated),
        sum(told) if len(told) == len(rows) else None,
        peak_rss(),
    )


def _grouped(heads: Sequence[tuple[int, ...]], decodes: Sequence[int]) -> list[Prompt]:
    """Makes one request of neighbours that are the same; 0 tokens cannot be asked for, so 1 is."""
    prompts: list[Prompt] = []
    for head, decode in zip(heads, decodes, strict=True):
        num_tokens = max(1, decode)
        last = prompts[-1] if prompts else None
        if last and (last.token_ids, last.num_tokens) == (head, num_tokens):
            prompts[-1] = Prompt(head, num_tokens, last.count + 1)
        else:
            prompts.append(Prompt(head, num_tokens, 1))
    return prompts
