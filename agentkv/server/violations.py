"""What is wrong with a request: all of it, by field, and the error that says so."""

from typing import NamedTuple

from agentkv.errors import InvalidRequest, Reason


class Violation(NamedTuple):
    """One thing that is wrong."""

    field: str
    what: str
    reason: Reason = Reason.INVALID_REQUEST


class Violations:
    """Collects what one request violates: the first thing of each field."""

    def __init__(self) -> None:
        self._found: dict[str, str] = {}
        self._reasons: set[Reason] = set()

    def __bool__(self) -> bool:
        """Whether there is any."""
        return bool(self._found)

    def add(self, field: str, what: str, reason: Reason = Reason.INVALID_REQUEST) -> None:
        """Notes one thing that is wrong."""
        self._found.setdefault(field, what)
        self._reasons.add(reason)

    def require(
        self, holds: bool, field: str, what: str, reason: Reason = Reason.INVALID_REQUEST
    ) -> bool:
        """Notes a violation unless something holds; returns whether it does."""
        if not holds:
            self.add(field, what, reason)
        return holds

    def raise_any(self) -> None:
        """Raises if there is any.

        Raises:
            InvalidRequest: Lists every violation. Its reason is theirs when they share one, else
                INVALID_REQUEST.
        """
        if not self._found:
            return
        reason = self._reasons.pop() if len(self._reasons) == 1 else Reason.INVALID_REQUEST
        listed = "; ".join(f"{field} {what}" for field, what in self._found.items())
        raise InvalidRequest(
            f"The request is wrong: {listed}.", reason=reason, violations=self._found
        )
