"""What to do when releasing fails at the end of a `with`: never hide what went wrong inside."""

from collections.abc import Iterator
from contextlib import contextmanager

from agentkv.errors import AgentKVError


@contextmanager
def not_hiding(error: BaseException | None) -> Iterator[None]:
    """Raises a failure of the block, or notes it on the exception that is on its way already.

    Args:
        error: What the `with` is left by; None when it ended well.
    """
    try:
        yield
    except AgentKVError as failure:
        if error is None:
            raise
        error.add_note(f"Releasing contexts failed as well: {failure}")
