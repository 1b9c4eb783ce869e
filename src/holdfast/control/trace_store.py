"""Stores the traces that agents upload in the run's folder, within limits."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

from holdfast.host.files import private_opener
from holdfast.run_dir import MAX_TRACE_BYTES, TRACE_NAME

MAX_TRACES_BYTES = 1 << 30
"""Most bytes of all traces of a run; a further one is refused."""


class TraceRefused(Exception):
    """A trace with a wrong name, or above a limit."""


class TraceStore:
    """The folder of a run's traces."""

    def __init__(
        self, folder: Path, *, max_bytes: int = MAX_TRACE_BYTES, max_total_bytes: int = MAX_TRACES_BYTES
    ) -> None:
        self._folder = folder
        self._max_bytes = max_bytes
        self._max_total_bytes = max_total_bytes

    async def store(self, name: str, content: AsyncIterator[bytes]) -> None:
        """Store a trace whole; raises TraceRefused and OSError."""
        if not TRACE_NAME.fullmatch(name):
            raise TraceRefused("this is no name of a trace")
        room = min(self._max_bytes, self._max_total_bytes - self._used_bytes())
        path = self._folder / name
        for folder in (self._folder, path.parent):
            folder.mkdir(exist_ok=True, mode=0o700)
        part = path.with_suffix(".part")
        try:
            with open(part, "wb", opener=private_opener) as file:  # noqa: ASYNC230 - the page cache takes 64 MiB
                async for block in content:
                    if (room := room - len(block)) < 0:
                        raise TraceRefused(
                            f"a trace has at most {self._max_bytes:,} bytes, all {self._max_total_bytes:,}"
                        )
                    file.write(block)
            part.rename(path)
        finally:
            part.unlink(missing_ok=True)

    def _used_bytes(self) -> int:
        return sum(path.stat().st_size for path in self._folder.glob("*/rank-*.gz"))
