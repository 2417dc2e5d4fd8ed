"""Sampling options of a request to SamplingParams, with everything that is wrong with them.

It looks at no list before it knows that the list is short, so that its work is bounded. What each
option may be stands in `agentkv.sampling_params`; here is what needs the vocabulary as well.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from agentkv.engine.request_checks import out_of_vocabulary
from agentkv.errors import InvalidRequest, Reason
from agentkv.sampling_params import SIZES, SamplingParams
from agentkv.server.violations import Violation
from agentkv.v1 import agentkv_pb2 as pb


class CheckedSampling(NamedTuple):
    """What options say, or what is wrong with them; then the params are the defaults."""

    params: SamplingParams
    violations: tuple[Violation, ...] = ()


def check_sampling(options: pb.SamplingOptions, vocab_size: int) -> CheckedSampling:
    """Checks sampling options; lists every violation."""
    too_long = [name for name, most in SIZES.items() if len(getattr(options, name)) > most]
    violations = [
        Violation(f"sampling.{name}", f"takes at most {SIZES[name]} entries") for name in too_long
    ]
    lists = _lists(options, too_long)
    violations += [
        Violation(f"sampling.{name}", what, Reason.TOKEN_OUT_OF_RANGE)
        for name, what in out_of_vocabulary(_token_ids(lists), vocab_size).items()
    ]
    # What has presence and was given; the others keep their defaults.
    given = {field.name: value for field, value in options.ListFields() if field.has_presence}
    params = SamplingParams()
    try:
        params = SamplingParams(
            **lists,
            ignore_eos=options.ignore_eos,
            include_stop=options.include_stop,
            logprobs=options.logprobs,
            penalize_prompt=options.penalize_prompt,
            **given,
        )
    except InvalidRequest as error:
        found = error.violations.items()
        violations += [Violation(f"sampling.{field}", what) for field, what in found]
    return CheckedSampling(SamplingParams() if violations else params, tuple(violations))


def _lists(options: pb.SamplingOptions, too_long: Sequence[str]) -> dict[str, Any]:
    """Reads the lists, those that are too long as empty ones: the rest is still checked."""
    lists: dict[str, Any] = dict.fromkeys(SIZES, ())
    for name in SIZES.keys() - set(too_long):
        value = getattr(options, name)
        # A map travels in any order, and equal options are to be equal values.
        lists[name] = tuple(sorted(value.items()) if name == "logit_bias" else value)
    return lists


def _token_ids(lists: Mapping[str, Any]) -> dict[str, Iterable[int]]:
    biased = [token for token, _ in lists["logit_bias"]]
    names = ("stop_token_ids", "allowed_token_ids", "banned_token_ids")
    return {"logit_bias": biased, **{name: lists[name] for name in names}}
