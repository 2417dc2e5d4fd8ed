"""What text must be before anything is done with it."""

from agentkv.errors import InvalidRequest


def check_text(text: str, field: str) -> None:
    """Checks that a text is Unicode without NUL.

    Raises:
        InvalidRequest: It is not; names the field.
    """
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InvalidRequest(
            "The text is not valid Unicode: it holds half a surrogate pair.",
            violations={field: f"lone surrogate at {error.start}"},
        ) from error
    if "\0" in text:
        raise InvalidRequest(
            "The text holds a NUL character.", violations={field: f"NUL at {text.index(chr(0))}"}
        )
