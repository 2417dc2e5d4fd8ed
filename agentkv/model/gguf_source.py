"""Where the bytes of a GGUF file lie: in one file, or in parts that follow each other.

Package indexes limit the size of a file, so that larger models come in parts. It reads nothing of
the format.
"""

import hashlib
import shutil
from pathlib import Path
from typing import NamedTuple, Self


class GgufSource(NamedTuple):
    """One GGUF file."""

    stem: str
    """Name without the suffix."""
    parts: tuple[Path, ...]
    """In order; one where it is whole."""

    @classmethod
    def of(cls, given: "Path | GgufSource") -> "GgufSource":
        """Takes a whole file, or what is a source already."""
        return given if isinstance(given, GgufSource) else cls(given.stem, (given,))

    @classmethod
    def of_parts(cls, parts: tuple[Path, ...]) -> Self:
        """Takes the parts of a file, named `<stem>.gguf.<anything>`, or one whole file."""
        return cls(parts[0].name.partition(".gguf")[0], parts)

    def sha256(self) -> str:
        """Hexadecimal SHA-256 of all bytes."""
        digest = hashlib.sha256()
        for part in self.parts:
            with part.open("rb") as file:
                while block := file.read(1 << 20):
                    digest.update(block)
        return digest.hexdigest()

    def whole(self, folder: Path) -> Path:
        """Finds the file in one piece; parts are put together in a folder that is the caller's."""
        if len(self.parts) == 1:
            return self.parts[0]
        path = folder / f"{self.stem}.gguf"
        with path.open("wb") as joined:
            for part in self.parts:
                with part.open("rb") as file:
                    shutil.copyfileobj(file, joined, 1 << 20)
        return path
