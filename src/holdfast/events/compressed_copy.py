"""A compressed copy, in memory, of what a log holds: what is cut off from the log can be put back from it."""

from __future__ import annotations

import zlib
from collections.abc import Iterator

_LEVEL = 1
"""Makes a log of steps a tenth of its size, at some 100 MB/s."""


class CompressedCopy:
    """Everything that was written to a log, in order."""

    def __init__(self) -> None:
        self._compressor = zlib.compressobj(_LEVEL)
        self._parts: list[bytes] = []

    def append(self, data: bytes) -> None:
        """Remember what was written after all that is remembered."""
        if part := self._compressor.compress(data):
            self._parts.append(part)

    def chunks(self) -> Iterator[bytes]:
        """All that is remembered, piece by piece."""
        expand = zlib.decompressobj()
        for part in (*self._parts, self._compressor.copy().flush()):
            if data := expand.decompress(part):
                yield data

    def lines(self) -> Iterator[bytes]:
        """All that is remembered, line by line, without their newlines."""
        rest = b""
        for piece in self.chunks():
            *whole, rest = (rest + piece).split(b"\n")
            yield from whole
