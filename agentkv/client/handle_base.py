"""What a handle is without a connection: its id, its last known state, its ownership."""

from typing import NoReturn, Self

from agentkv.client.handle_state import HandleState
from agentkv.client.values import ContextInfo, Usage


class HandleBase:
    """The part of a handle that needs no call.

    A copy of a handle, shallow or deep, is the same handle: search libraries copy the states of
    their trees, and a copy must not fork anything on the server. Pickling is refused: keep `id`
    and `Client.attach` it later.
    """

    def __init__(self, state: HandleState) -> None:
        self._state = state

    @property
    def id(self) -> str:
        """Names the context: opaque, and enough to attach to it from anywhere."""
        return self._state.id

    @property
    def length(self) -> int:
        """Counts the committed tokens, as far as this handle knows."""
        return self._state.length

    @property
    def info(self) -> ContextInfo:
        """Returns the context as the last answer showed it; `refresh` asks anew."""
        return self._state.info

    @property
    def usage(self) -> Usage:
        """Sums the tokens that calls on this handle ran, reused and made."""
        return self._state.usage

    @property
    def prompt_logprobs(self) -> tuple[float, ...]:
        """Log-probabilities of the prompt's tokens but the first, when `create` asked for them."""
        return self._state.prompt_logprobs

    def detach(self) -> Self:
        """Gives up ownership: neither a `with` nor closing the client releases the context.

        Branches forked from it stay owned. Returns this handle, which works on as before.
        """
        self._state.lineage.disown()
        return self

    def _enter(self) -> Self:
        self._state.lineage.own()
        return self

    def __copy__(self) -> Self:
        """Returns this handle."""
        return self

    def __deepcopy__(self, memo: object) -> Self:
        """Returns this handle."""
        return self

    def __reduce__(self) -> NoReturn:
        """Refuses to be pickled.

        Raises:
            TypeError: Always; the message says what to keep instead.
        """
        raise TypeError(
            "A handle belongs to a connection and cannot be pickled: keep handle.id, and attach "
            "to it with client.attach(id)."
        )

    def __repr__(self) -> str:
        """Shows the class, the id and the length."""
        return f"<{type(self).__name__} {self.id} length={self.length}>"
