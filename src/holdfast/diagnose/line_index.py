"""Maps byte offsets to line numbers, for the few quoted lines.

Counting all lines of a log takes a third as long as searching it for every rule, and few chunks are quoted.
"""

from __future__ import annotations

from pathlib import Path

from msgspec import Struct

from holdfast.diagnose.open_files import NotARegularFile, SparseFileReader

_READ_BYTES = 1 << 18


class LineIndex:
    """The lines of one file, counted as far as requested; offsets are those in its data, without its holes."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset, self._number = 0, 1
        self._file_offset = 0
        """Where `_offset` is in the file, holes included."""

    def at(self, offset: int) -> int:
        """The number, from 1, of the line that begins at `offset`; the last known one if the file is gone."""
        if offset < self._offset:
            self._offset, self._number, self._file_offset = 0, 1, 0
        try:
            with SparseFileReader(self._path, self._file_offset) as file:
                data = bytearray(_READ_BYTES)
                while self._offset < offset:
                    count = file.readinto(memoryview(data)[: offset - self._offset])
                    if not count:
                        break
                    self._offset += count
                    self._number += data.count(b"\n", 0, count)
                    self._file_offset = file.offset
        except (OSError, NotARegularFile):
            pass
        return self._number


class LazyLineNumber(Struct, frozen=True):
    """The number of the line that begins at an offset, computed by `int`."""

    index: LineIndex
    offset: int

    def __int__(self) -> int:
        return self.index.at(self.offset) if self.offset else 1
