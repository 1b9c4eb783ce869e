"""Owns what a container says: lines with the time at which they came, one file for each start of the container."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from io import FileIO
from pathlib import Path

_LINE_BYTES = 16 * 1024
"""As elsewhere, what is longer is cut in two."""
_POLL_S = 0.1


@dataclass(frozen=True, kw_only=True)
class LogOptions:
    """What `kubectl logs` asks for."""

    follow: bool = False
    timestamps: bool = False
    tail: int | None = None
    since: str | None = None
    limit_bytes: int | None = None


def now() -> str:
    """This moment in UTC, as Kubernetes writes it, in nanoseconds for lines to be sorted by."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%f000Z")


def ago(seconds: int) -> str:
    """So many seconds before now, to be compared with the time of a line."""
    return (datetime.now(UTC) - timedelta(seconds=seconds)).strftime("%Y-%m-%dT%H:%M:%S.%f000Z")


async def write_log(descriptor: int, path: Path) -> None:
    """Write down what comes out of a pipe, until nobody has its other end."""
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
    """What is asked for of a file, and, when it is to be followed, what comes until it no longer `runs`."""
    with path.open("rb") as file:
        listed = list(_since(file, options.since))
        if options.tail is not None:
            listed = listed[len(listed) - options.tail :] if options.tail < len(listed) else listed
        text = b"".join(_format_lines(listed, options))
        yield text if options.limit_bytes is None else text[: options.limit_bytes]
        part = b""
        while options.follow:
            # Asked before reading, so that the last words of one that ends meanwhile are read.
            going_on = is_running()
            *lines, part = (part + file.read()).split(b"\n")
            yield b"".join(_format_lines((line + b"\n" for line in lines), options))
            if not going_on:
                return
            await asyncio.sleep(_POLL_S)


def _pipe(descriptor: int) -> FileIO:
    return FileIO(descriptor, "rb")


def _since(lines: Iterable[bytes], since: str | None) -> Iterator[bytes]:
    # Times of lines have fractions of a second; without its Z a time is before those that it begins.
    first = b"" if since is None else since.rstrip("Z").encode()
    return (line for line in lines if line.partition(b" ")[0] >= first)


def _format_lines(lines: Iterable[bytes], wanted: LogOptions) -> Iterator[bytes]:
    return (line if wanted.timestamps else line.partition(b" ")[2] for line in lines)
