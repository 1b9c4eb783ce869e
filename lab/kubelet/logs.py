"""Container logs: timestamped lines, one file per start of the container."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from io import FileIO
from pathlib import Path

_LINE_BYTES = 16 * 1024
"""Longer lines are split, as in other runtimes."""
_POLL_S = 0.1


@dataclass(frozen=True, kw_only=True)
class LogOptions:
    """Options of `kubectl logs`."""

    follow: bool = False
    timestamps: bool = False
    tail: int | None = None
    since: str | None = None
    limit_bytes: int | None = None


def now() -> str:
    """The current UTC time in Kubernetes' format, with nanoseconds for sorting."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%f000Z")


def ago(seconds: int) -> str:
    """The time `seconds` ago, to compare with timestamps of lines."""
    return (datetime.now(UTC) - timedelta(seconds=seconds)).strftime("%Y-%m-%dT%H:%M:%S.%f000Z")


async def write_log(descriptor: int, path: Path) -> None:
    """Write a pipe's output to a file until all its writers have closed it."""
    stream = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(stream), _pipe(descriptor))
    with path.open("ab", buffering=0) as file:
        rest = b""
        while data := await stream.read(_LINE_BYTES):
            *lines, rest = (rest + data).split(b"\n")
            if len(rest) >= _LINE_BYTES:
                lines, rest = [*lines, rest], b""
            stamp = now().encode()
            file.write(b"".join(b"%s %s\n" % (stamp, line) for line in lines))
        if rest:
            file.write(b"%s %s\n" % (now().encode(), rest))


async def read_log(path: Path, options: LogOptions, *, is_running: Callable[[], bool]) -> AsyncIterator[bytes]:
    """Read a log with these options; with `follow`, continue until the container no longer runs."""
    with path.open("rb") as file:
        listed = list(_since(file, options.since))
        if options.tail is not None:
            listed = listed[len(listed) - options.tail :] if options.tail < len(listed) else listed
        text = b"".join(_format_lines(listed, options))
        yield text if options.limit_bytes is None else text[: options.limit_bytes]
        part = b""
        while options.follow:
            # Check before reading, so that the last lines of a container that exits meanwhile are read.
            running = is_running()
            *lines, part = (part + file.read()).split(b"\n")
            yield b"".join(_format_lines((line + b"\n" for line in lines), options))
            if not running:
                return
            await asyncio.sleep(_POLL_S)


def _pipe(descriptor: int) -> FileIO:
    return FileIO(descriptor, "rb")


def _since(lines: Iterable[bytes], since: str | None) -> Iterator[bytes]:
    # Timestamps of lines have fractions of a second; without its Z, a time sorts before all timestamps it is a prefix
    # of.
    first = b"" if since is None else since.rstrip("Z").encode()
    return (line for line in lines if line.partition(b" ")[0] >= first)


def _format_lines(lines: Iterable[bytes], options: LogOptions) -> Iterator[bytes]:
    return (line if options.timestamps else line.partition(b" ")[2] for line in lines)
