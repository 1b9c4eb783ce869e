"""Owns which line of a file a byte stands in, for the few lines that anybody quotes.

Counting all lines of a log takes a third as long as searching it for every rule, and hardly a block of it is quoted.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

_READ_BYTES = 1 << 18


class Lines:
    """The lines of one file, counted as far as somebody has asked."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset, self._number = 0, 1

    def at(self, offset: int) -> int:
        """The number, from 1, of the line that begins at `offset`; the last one known where the file has gone."""
        if offset < self._offset:
            self._offset, self._number = 0, 1
        try:
            with self._path.open("rb", buffering=0) as file:
                file.seek(self._offset)
                while self._offset < offset and (data := file.read(min(_READ_BYTES, offset - self._offset))):
                    self._offset += len(data)
                    self._number += data.count(b"\n")
        except OSError:
            pass
        return self._number


@dataclass(frozen=True)
class LineAt:
    """The number of the line that begins at an offset, for who asks `int` of it."""

    lines: Lines
    offset: int

    def __int__(self) -> int:
        return self.lines.at(self.offset) if self.offset else 1
