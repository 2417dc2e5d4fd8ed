"""What every config does with a value that cannot be."""

from agentkv.errors import InvalidRequest


def require(holds: bool, message: str) -> None:
    """Refuses a config.

    Args:
        holds: What has to be so.
        message: Says which option is wrong, and how.

    Raises:
        InvalidRequest: It does not hold.
    """
    if not holds:
        raise InvalidRequest(message)
