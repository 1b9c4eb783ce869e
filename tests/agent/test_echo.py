"""What ranks write, in their agent's standard output: whole lines with their rank, and never a rank that waits."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.agent.echo import MAX_BACKLOG_BYTES, MAX_WRITE_BYTES, Echo
from holdfast.protocol.rank_output import OutputSource, parse_line

FIRST = OutputSource(replica=0, rank=0, attempt=0)
OTHER = OutputSource(replica=1, rank=13, attempt=2)


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    ends = os.pipe()
    yield ends
    for end in ends:
        os.close(end)


def read(end: int) -> bytes:
    """What is in a pipe."""
    os.set_blocking(end, False)
    said = b""
    try:
        while data := os.read(end, 1 << 20):
            said += data
    except BlockingIOError:
        pass
    return said


def by_rank(said: bytes) -> dict[OutputSource, bytes]:
    """What each rank has written, had back from the agent's output."""
    found = dict[OutputSource, bytes]()
    assert said.endswith(b"\n")
    for line in said.removesuffix(b"\n").split(b"\n"):
        assert len(line) < MAX_WRITE_BYTES
        echoed = parse_line(line)
        assert echoed is not None, line
        assert echoed.has_replicas == (echoed.source == OTHER)
        found[echoed.source] = found.get(echoed.source, b"") + echoed.text
    return found


def test_every_line_has_its_rank_and_what_was_written_can_be_had_back(tmp_path: Path, pipe: tuple[int, int]) -> None:
    reader, writer = pipe
    logs = {FIRST: tmp_path / "first", OTHER: tmp_path / "other"}
    wrote = {
        FIRST: b"hello\n\n\x00\xff[rank 7, attempt 1] not rank 7\r 50%\r100%\n" + b"x" * 10_000 + b"\nno end",
        OTHER: b"step 1\n" * 100,
    }
    echo = Echo(writer)
    for who, path in logs.items():
        echo.follow(path, who, several=who == OTHER)
        path.write_bytes(wrote[who])
    asyncio.run(echo.finish(10.0))
    said = read(reader)
    assert said.startswith(b"[rank 0, attempt 0] hello\n[rank 0, attempt 0] \n")
    assert b"[replica 1, rank 13, attempt 2] step 1\n" in said
    assert by_rank(said) == wrote


def test_lines_come_while_they_are_written_and_a_file_that_was_emptied_begins_anew(
    tmp_path: Path, pipe: tuple[int, int]
) -> None:
    reader, writer = pipe
    path = tmp_path / "rank-0.log"

    async def written() -> bytes:
        echo, said = Echo(writer), b""
        echo.follow(path, FIRST, several=False)
        running = asyncio.ensure_future(echo.run())
        for text, line in ((b"one\ntw", b"] one\n"), (b"one\ntwo\n", b"] two\n"), (b"new\n", b"] new\n")):
            path.write_bytes(text)
            deadline = time.monotonic() + 60.0
            while line not in said:
                assert time.monotonic() < deadline, said
                said += read(reader)
                await asyncio.sleep(0.01)
        running.cancel()
        return said

    assert asyncio.run(written()) == b"".join(b"[rank 0, attempt 0] %s\n" % word for word in (b"one", b"two", b"new"))


def test_slow_reader_blocks_no_rank_and_sees_what_it_misses(tmp_path: Path, pipe: tuple[int, int]) -> None:
    reader, writer = pipe
    path = tmp_path / "rank-0.log"
    path.write_bytes(b"".join(b"line %d\n" % number for number in range(100_000)))
    echo = Echo(writer)
    echo.follow(path, FIRST, several=False)
    before = time.monotonic()
    asyncio.run(echo.finish(0.1))  # nobody reads
    assert time.monotonic() - before < 60.0
    early = read(reader)
    assert early
    with path.open("ab") as log:
        log.write(b"y" * MAX_BACKLOG_BYTES * 2 + b"\nthe last words\n")

    async def read_to_the_end() -> bytes:
        finishing = asyncio.ensure_future(echo.finish(60.0))
        said = b""
        while not finishing.done():
            said += read(reader)
            await asyncio.sleep(0)
        return said + read(reader)

    text = by_rank(early + asyncio.run(read_to_the_end()))[FIRST]
    assert b"bytes are left out here" in text
    assert str(path).encode() in text
    assert text.endswith(b"the last words\n")
    assert len(text) < MAX_BACKLOG_BYTES


def test_output_that_nobody_has_open_any_more_is_no_error(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    path = tmp_path / "rank-0.log"
    path.write_bytes(b"line\n" * 1000)
    echo = Echo(writer)
    echo.follow(path, FIRST, several=False)
    asyncio.run(echo.finish(10.0))
    os.close(writer)


def test_file_is_opened_once_and_a_fifo_in_its_place_blocks_nobody(tmp_path: Path, pipe: tuple[int, int]) -> None:
    reader, writer = pipe
    path = tmp_path / "rank-0.log"
    echo = Echo(writer)
    echo.follow(path, FIRST, several=False)

    async def copied(text: bytes) -> None:
        """Wait until a text has been copied; a blocked agent would never end."""
        running, said = asyncio.ensure_future(echo.run()), b""
        async with asyncio.timeout(60.0):
            while text not in said:
                said += read(reader)
                await asyncio.sleep(0.01)
        running.cancel()

    def descriptors() -> list[str]:
        names = (f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd"))
        return [name for name in names if os.path.exists(name) and os.readlink(name).startswith(str(path))]

    path.write_bytes(b"one\n")
    asyncio.run(copied(b"one"))
    (before,) = descriptors()
    with path.open("ab") as log:
        log.write(b"two\n")
    asyncio.run(copied(b"two"))
    assert descriptors() == [before]
    path.unlink()
    os.mkfifo(path)
    asyncio.run(echo.finish(0.1))
    path.unlink()
    path.write_bytes(b"three is as long as one and two\n")
    echo.follow(path, FIRST, several=False)
    asyncio.run(copied(b"three"))
    asyncio.run(echo.finish(10.0))
    assert descriptors() == []
