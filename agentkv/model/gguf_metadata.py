"""Typed reading of the key-value part of a GGUF file.

It knows names and types, not what they mean for a model or a tokenizer.
"""

from typing import TYPE_CHECKING, TypeVar

from agentkv.errors import UnsupportedModelError

if TYPE_CHECKING:
    from gguf import GGUFReader

T = TypeVar("T", int, float, str, bool)


class GgufMetadata:
    """Keys and values of one GGUF file."""

    def __init__(self, reader: "GGUFReader") -> None:
        self._fields = reader.fields

    def __contains__(self, key: str) -> bool:
        return key in self._fields

    def keys(self) -> list[str]:
        """Lists every key, in the order of the file."""
        return list(self._fields)

    def require(self, key: str, kind: type[T]) -> T:
        """Reads one value.

        Raises:
            UnsupportedModelError: The key is missing or of another type.
        """
        value = self.get(key, kind)
        if value is None:
            raise UnsupportedModelError(f"The GGUF file lacks the key {key!r}.")
        return value

    def get(self, key: str, kind: type[T]) -> T | None:
        """Reads one value; None when the key is missing.

        Raises:
            UnsupportedModelError: The value is of another type, for example one number per layer.
        """
        if key not in self._fields:
            return None
        value: object = self._fields[key].contents()
        if not isinstance(value, kind):
            raise UnsupportedModelError(
                f"The GGUF key {key!r} holds {type(value).__name__}, not one {kind.__name__}."
            )
        return value

    def require_list(self, key: str, kind: type[T]) -> list[T]:
        """Reads an array of values of one type.

        Raises:
            UnsupportedModelError: The key is missing or holds something else.
        """
        values: object = self._fields[key].contents() if key in self._fields else None
        if not isinstance(values, list) or not all(isinstance(value, kind) for value in values):
            raise UnsupportedModelError(f"The GGUF file lacks the {kind.__name__} list {key!r}.")
        return values
