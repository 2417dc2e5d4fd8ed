"""Finds fields of a message that this version's contract does not have. It knows no method."""

from collections.abc import Iterator
from typing import Any, Final

from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

MAX_NAMED_BYTES: Final = 1024
"""Unknown fields are named up to here; to find millions takes many seconds."""


def unknown_fields(request: Message) -> list[str]:
    """Lists the fields of a request that this version does not know, at any depth.

    Returns:
        Their numbers, those of sampling options with a prefix; `request` alone when there are too
        many, or only deeper ones.
    """
    known = type(request)()
    known.CopyFrom(request)
    known.DiscardUnknownFields()
    num_bytes = request.ByteSize() - known.ByteSize()
    if num_bytes == 0:
        return []
    fields = []
    if num_bytes <= MAX_NAMED_BYTES:
        fields += [str(field.field_number) for field in _unknown(request)]
        options = getattr(request, "sampling", None)
        if options is not None:
            fields += [f"sampling.{field.field_number}" for field in _unknown(options)]
    return fields or ["request"]


def _unknown(message: Message) -> Iterator[Any]:
    fields = UnknownFieldSet(message)
    return (fields[i] for i in range(len(fields)))
