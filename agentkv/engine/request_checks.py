"""What a call may ask for, checked before anything changes. Lists nothing that depends on load."""

from collections.abc import Iterable, Mapping, Sequence

from agentkv.config import LimitsConfig
from agentkv.constraint import Continued
from agentkv.core.context import Region
from agentkv.engine.grammar import Grammar
from agentkv.engine.outputs import ModelFacts
from agentkv.errors import InvalidRequest, Reason
from agentkv.sampling_params import SamplingParams


class RequestChecks:
    """The limits of one model and one server."""

    def __init__(self, facts: ModelFacts, limits: LimitsConfig) -> None:
        self._facts = facts
        self._limits = limits

    def prompt(self, token_ids: Sequence[int]) -> None:
        """Checks the first tokens of a context.

        Raises:
            InvalidRequest: There is none, or see `tokens`.
        """
        if not token_ids:
            raise InvalidRequest(
                "A context needs at least one token.", violations={"prompt": "must not be empty"}
            )
        self.tokens(token_ids, length=0)

    def adapter(self, name: str) -> None:
        """Checks that a context may be created with an adapter; empty names none.

        Raises:
            InvalidRequest: There is no such adapter; names those that there are.
        """
        known = self._facts.adapters
        if name and name not in known:
            there_are = f"there are {', '.join(known)}" if known else "the server has none"
            raise InvalidRequest(
                f"There is no adapter {name!r}; {there_are}.",
                violations={"adapter": f"names no adapter; {there_are}"},
            )

    def tokens(self, token_ids: Sequence[int], *, length: int) -> None:
        """Checks tokens that are to follow `length` others.

        Raises:
            InvalidRequest: An id beyond the vocabulary, or over the model's longest context.
        """
        longest = self._facts.max_length
        if length + len(token_ids) > longest:
            raise InvalidRequest(
                f"{length} + {len(token_ids)} tokens exceed the model's longest context, "
                f"{longest}.",
                reason=Reason.CONTEXT_TOO_LONG,
                metadata={"length": length, "max_length": longest},
            )
        self._in_vocabulary(token_ids, "token_ids")

    def generation(self, params: SamplingParams, ends: frozenset[int], *, length: int) -> None:
        """Checks that one more token can be sampled after `length` others.

        Args:
            params: How it is sampled.
            ends: Ids that end the generation.
            length: Tokens before it.

        Raises:
            InvalidRequest: There is nothing to sample after, no room for one more token, no token
                that may be chosen, or an option names a token beyond the vocabulary.
        """
        longest = self._facts.max_length
        if length == 0:
            raise InvalidRequest(
                "The context is empty: extend it before generating.",
                violations={"context_id": "names an empty context"},
            )
        if length >= longest:
            raise InvalidRequest(
                f"The context holds {length} tokens, the model's longest: fork or truncate it to "
                "an earlier position.",
                reason=Reason.CONTEXT_TOO_LONG,
                metadata={"length": length, "max_length": longest},
            )
        self._token_options(params)
        self._leaves_a_token(params, ends)

    def grammar(
        self, params: SamplingParams, grammar: Grammar | Continued | None, region: Region | None
    ) -> None:
        """Checks that text can be constrained as asked.

        Args:
            params: How to sample.
            grammar: What the caller asked for.
            region: What was constrained at that place before, if anything.

        Raises:
            InvalidRequest: There is nothing to continue, or the text may never end.
        """
        violations = {}
        if isinstance(grammar, Continued) and region is None:
            violations["constraint.continued"] = "needs a constrained generation before it"
        if grammar is not None and params.ignore_eos:
            violations["sampling.ignore_eos"] = "contradicts a constraint, which ends the text"
        if violations:
            listed = "; ".join(f"{field} {what}" for field, what in violations.items())
            raise InvalidRequest(f"The request is wrong: {listed}.", violations=violations)

    def continuations(self, continuations: Sequence[Sequence[int]], *, length: int) -> None:
        """Checks what is to be scored after `length` tokens.

        Raises:
            InvalidRequest: None or too many, an empty one, an empty context, or see `tokens`.
        """
        most = self._limits.max_continuations
        wrong = None
        if not 1 <= len(continuations) <= most:
            wrong = f"takes 1 to {most} continuations, got {len(continuations)}"
        elif not all(continuations):
            wrong = "must not contain an empty continuation"
        elif length == 0:
            wrong = "needs a context with at least one token before it"
        if wrong is not None:
            raise InvalidRequest(f"continuations: {wrong}.", violations={"continuations": wrong})
        for token_ids in continuations:
            self.tokens(token_ids, length=length)

    def _token_options(self, params: SamplingParams) -> None:
        named = {
            "stop_token_ids": params.stop_token_ids,
            "logit_bias": [token for token, _ in params.logit_bias],
            "allowed_token_ids": params.allowed_token_ids,
            "banned_token_ids": params.banned_token_ids,
        }
        violations = out_of_vocabulary(named, self._facts.vocab_size)
        if violations:
            listed = "; ".join(f"{field}: {what}" for field, what in violations.items())
            raise InvalidRequest(
                f"Sampling options name unknown tokens: {listed}.",
                reason=Reason.TOKEN_OUT_OF_RANGE,
                violations=violations,
            )

    def _leaves_a_token(self, params: SamplingParams, ends: frozenset[int]) -> None:
        """Checks that some token may be chosen; before `min_tokens` none that ends it may."""
        banned = set(params.banned_token_ids)
        if params.min_tokens:
            banned |= ends
        allowed = set(params.allowed_token_ids)
        # All of them are in the vocabulary, so that a number is enough.
        is_wrong = allowed <= banned if allowed else len(banned) >= self._facts.vocab_size
        if is_wrong:
            field = "allowed_token_ids" if allowed else "banned_token_ids"
            what = "leaves no token to choose"
            if params.min_tokens:
                what += " before min_tokens are generated"
            raise InvalidRequest(f"{field} {what}.", violations={field: what})

    def _in_vocabulary(self, token_ids: Sequence[int], field: str) -> None:
        width = self._facts.vocab_size
        if token_ids and not (min(token_ids) >= 0 and max(token_ids) < width):
            raise InvalidRequest(
                f"{field} must be in [0, {width}).",
                reason=Reason.TOKEN_OUT_OF_RANGE,
                violations={field: f"must be in [0, {width})"},
            )


def out_of_vocabulary(named: Mapping[str, Iterable[int]], vocab_size: int) -> dict[str, str]:
    """Finds the options that name a token beyond the vocabulary, and says what is wrong."""
    return {
        field: f"must each be below the vocabulary width {vocab_size}"
        for field, token_ids in named.items()
        if max(token_ids, default=0) >= vocab_size
    }
